-- Add a job unless its id is taken or the queue is full.
--
-- KEYS 1 job hash  2 jobs stream for it  3... all jobs streams
-- ARGV 1 most entries in all  2 fingerprint of the request  3... its fields
-- Returns added, known (the same request was sent before), conflict or busy.
local known = redis.call('HGET', KEYS[1], 'fingerprint')
if known then return known == ARGV[2] and 'known' or 'conflict' end
local depth = 0
for k = 3, #KEYS do depth = depth + redis.call('XLEN', KEYS[k]) end
if depth >= tonumber(ARGV[1]) then return 'busy' end
local args = { 'XADD', KEYS[2], '*' }
for i = 3, #ARGV do args[#args + 1] = ARGV[i] end
redis.call(unpack(args))
return 'added'
