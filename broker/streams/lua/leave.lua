-- A worker says good-bye.
--
-- KEYS 1 workers hash, then the jobs streams    ARGV 1 group  2 worker
redis.call('HDEL', KEYS[1], ARGV[2])
for k = 2, #KEYS do
  local held = redis.pcall('XPENDING', KEYS[k], ARGV[1], '-', '+', 1, ARGV[2])
  if not held.err and not held[1] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[k], ARGV[1], ARGV[2])
  end
end
return 1
