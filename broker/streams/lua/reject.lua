-- End a job that cannot run: one error entry, entry removed. A job of that name that runs under
-- another entry is left alone.
--
-- KEYS 1 job hash  2 reply stream  3 jobs stream of the entry  4 cancel mark
-- ARGV 1 group  2 worker  3 entry id  4 reply TTL, ms  5... fields of the error entry
-- Returns ok, lost, finished or duplicate.
local stream, group, entry = KEYS[3], ARGV[1], ARGV[3]
local where = stream .. ' ' .. entry
if owner_of(stream, group, entry) ~= ARGV[2] then return 'lost' end
local h = redis.call('HMGET', KEYS[1], 'entry', 'state')
local attempt, seq, ended = top_of(KEYS[2])
local active = h[2] == 'running' or h[2] == 'queued'
if ended or (h[1] and h[1] ~= where and active and is_alive(h[1], group)) then
  remove(stream, group, entry)
  return ended and 'finished' or 'duplicate'
end
local fields = {}
for i = 5, #ARGV do fields[#fields + 1] = ARGV[i] end
if attempt == 0 and is_emptied(KEYS[2]) then
  attempt = tonumber(redis.call('HGET', KEYS[1], 'attempt')) or 0
  redis.call('DEL', KEYS[2])
end
add(KEYS[2], false, (attempt + 1) .. '-' .. (seq + 1), fields)
redis.call('HSET', KEYS[1], 'state', 'failed', 'code', field(fields, 'code'), 'entry', where,
  'finished_ms', now_ms())
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[4])
remove(stream, group, entry)
return 'ok'
