-- Take over entries of one stream: released ones at once, others after their lease, and our own
-- ones that we do not know of (a read whose reply was lost).
--
-- KEYS 1 jobs stream
-- ARGV 1 group  2 worker  3 lease, ms, or '' to leave other workers' alone  4 how many
--      5 idle time after which an own entry counts as unknown, ms  6... entry ids that we know
-- Returns {{{entry id, fields, 1 if it was released}...}, number of deleted entries}.
local stream, group, worker, max = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local known, num_known, taken, deleted, bytes = {}, #ARGV - 5, {}, 0, 0
for i = 6, #ARGV do known[ARGV[i]] = true end

local function take(entry, released)
  if known[entry] then return end
  known[entry] = true
  local got = redis.call('XRANGE', stream, entry, entry)[1]
  if got then
    taken[#taken + 1] = { entry, got[2], released }
    bytes = bytes + size_of(got[2])
  else
    redis.call('XACK', stream, group, entry)  -- deleted or trimmed while it was pending
    deleted = deleted + 1
  end
end

while #taken < max and bytes < MAX_BYTES do
  local released = redis.call('XPENDING', stream, group, '-', '+', math.min(max - #taken, PAGE),
    '_released')
  if #released == 0 then break end
  for _, p in ipairs(released) do
    redis.call('XCLAIM', stream, group, worker, 0, p[1], 'JUSTID')
    take(p[1], 1)
  end
end
local own = redis.call('XPENDING', stream, group, 'IDLE', ARGV[5], '-', '+', num_known + max,
  worker)
for _, p in ipairs(own) do
  if #taken < max and not known[p[1]] then
    -- its lease begins now, or another worker takes it from us in the middle of our start
    redis.call('XCLAIM', stream, group, worker, 0, p[1], 'JUSTID')
    take(p[1], 0)
  end
end
local cursor = '0-0'
while ARGV[3] ~= '' and #taken < max and bytes < MAX_BYTES do
  local got = redis.call('XAUTOCLAIM', stream, group, worker, ARGV[3], cursor, 'COUNT',
    math.min(max - #taken, PAGE), 'JUSTID')
  cursor = got[1]
  deleted = deleted + (got[3] and #got[3] or 0)  -- 7.0 and later acknowledge them themselves
  for _, entry in ipairs(got[2]) do take(entry, 0) end
  if cursor == '0-0' then break end
end
return { taken, deleted }
