-- End a queued job that no worker holds. Only for jobs that are named by their entry: others, and
-- those in a `body`, which is not read here, are found by the cancel mark when they are picked up.
--
-- The mark of a job that has ended goes, or it would cancel a later job of that id.
--
-- KEYS 1 job hash  2 reply stream  3 cancel mark  4... jobs streams, if the job id is an entry id
-- ARGV 1 group  2 entry id  3 reply TTL, ms  4... fields of the done entry
-- Returns 1 if the job was ended here.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'done' or state == 'failed' then
  redis.call('DEL', KEYS[3])
  return 0
end

local function is_named_by(entry, fields)
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == 'body' or (name == 'job' and fields[i + 1] ~= entry) then return false end
  end
  return true
end

for k = 4, #KEYS do
  local stream, entry = KEYS[k], ARGV[2]
  local got = redis.call('XRANGE', stream, entry, entry)[1]
  if got and is_named_by(entry, got[2]) and not owner_of(stream, ARGV[1], entry) then
    local fields = {}
    for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
    if add(KEYS[2], false, '1-1', fields) ~= 'ok' then return 0 end
    redis.call('HSET', KEYS[1], 'state', 'done', 'reason', 'cancelled', 'finished_ms', now_ms())
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
    redis.call('DEL', KEYS[3])
    remove(stream, ARGV[1], entry)
    return 1
  end
end
return 0
