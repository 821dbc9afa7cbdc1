-- End a queued job that no worker holds. Only for jobs that are named by their entry: others are
-- found by the cancel mark when they are picked up.
--
-- KEYS 1 job hash  2 reply stream  3 cancel mark  4... jobs streams
-- ARGV 1 group  2 entry id  3 reply TTL, ms  4... fields of the done entry
-- Returns 1 if the job was ended here.
for k = 4, #KEYS do
  local stream, entry = KEYS[k], ARGV[2]
  if redis.call('XRANGE', stream, entry, entry)[1] and not owner_of(stream, ARGV[1], entry) then
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
