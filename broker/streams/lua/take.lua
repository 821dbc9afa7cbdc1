-- Read new entries: some of low priority first, so that high cannot starve it, then high, normal
-- and low up to the rest of the free slots. Stops early when the entries are large.
--
-- KEYS 1 high  2 normal  3 low    ARGV 1 group  2 worker  3 free slots  4 of them kept for low
-- Returns {stream number, entry id, fields} for each.
local taken, bytes = {}, 0
local function read(k, count)
  while count > 0 and bytes < MAX_BYTES do
    local got = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT',
      math.min(count, PAGE), 'STREAMS', KEYS[k], '>')
    if not got then return end
    for _, e in ipairs(got[1][2]) do
      taken[#taken + 1] = { k, e[1], e[2] }
      bytes = bytes + size_of(e[2])
      count = count - 1
    end
  end
end
local free = tonumber(ARGV[3])
read(3, math.min(tonumber(ARGV[4]), free))
for k = 1, 3 do read(k, free - #taken) end
return taken
