-- Renew the leases of entries that are still ours. A worker that lost one must not take it back by
-- renewing it.
--
-- KEYS 1 jobs stream, then for each entry: job hash, reply stream
-- ARGV 1 group  2 worker  3 TTL while unfinished, ms
--      4... for each entry: entry id, attempt ('' before the fence)
-- Returns for each entry: 1 kept, 0 lost, 2 the entry is gone, but nobody else is known to have its job.
local result = {}
for i = 1, (#ARGV - 3) / 2 do
  local entry, attempt = ARGV[2 * i + 2], ARGV[2 * i + 3]
  local job, out = KEYS[2 * i], KEYS[2 * i + 1]
  local owner = owner_of(KEYS[1], ARGV[1], entry)
  if owner == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    result[i] = 1
  elseif not owner and attempt == '' then
    result[i] = 2  -- perhaps ended by a command of ours whose answer was lost: the fence will say
  elseif not owner then
    -- deleted while it ran, or all of Redis was emptied: then nobody else knows the job either
    local h = redis.pcall('HMGET', job, 'attempt', 'state')
    local is_ours = h[1] == attempt and h[2] == 'running'
    result[i] = (is_ours or (not h[1] and redis.call('EXISTS', out) == 0)) and 2 or 0
  else
    result[i] = 0
  end
  if result[i] > 0 and attempt ~= '' then
    redis.call('PEXPIRE', job, ARGV[3])
    redis.call('PEXPIRE', out, ARGV[3])
  end
end
return result
