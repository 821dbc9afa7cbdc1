-- Give an entry back without counting the attempt against the job. Any worker may take it at once.
--
-- KEYS 1 job hash  2 jobs stream
-- ARGV 1 group  2 worker  3 entry id  4 attempt, or '' before the fence
-- Returns 1, or 0 if the entry was not ours.
if owner_of(KEYS[2], ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
redis.call('XCLAIM', KEYS[2], ARGV[1], '_released', 0, ARGV[3], 'IDLE', 86400000, 'JUSTID')
if ARGV[4] ~= '' and redis.call('HGET', KEYS[1], 'attempt') == ARGV[4] then
  redis.call('HSET', KEYS[1], 'released', '1', 'state', 'queued')
end
return 1
