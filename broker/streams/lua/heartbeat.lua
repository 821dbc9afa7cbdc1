-- A sign of life with the server's time; now and then forget workers that gave none for long.
--
-- KEYS 1 workers hash, then the jobs streams
-- ARGV 1 group  2 worker  3 JSON object without the time
--      4 silence after which a worker is forgotten, ms, or '' to forget nobody now
local now = now_ms()
redis.call('HSET', KEYS[1], ARGV[2], '{"seen_ms":' .. now .. ',' .. string.sub(ARGV[3], 2))
if ARGV[4] == '' then return now end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local seen = tonumber(string.match(all[i + 1], '"seen_ms":(%d+)') or 0)
  if now - seen > tonumber(ARGV[4]) then
    redis.call('HDEL', KEYS[1], all[i])
    for k = 2, #KEYS do  -- deleting a consumer forgets what it holds: only when it holds nothing
      local held = redis.pcall('XPENDING', KEYS[k], ARGV[1], '-', '+', 1, all[i])
      if not held.err and not held[1] then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[k], ARGV[1], all[i])
      end
    end
  end
end
return now
