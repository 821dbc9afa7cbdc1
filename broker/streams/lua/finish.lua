-- End a job: the terminal entry first; only if the reply stream took it, everything else.
--
-- KEYS 1 job hash  2 reply stream  3 jobs stream of the entry  4 dead stream  5 cancel mark
--      6 idempotency key, or the job hash where there is none
-- ARGV 1 group  2 entry id  3 job id  4 reply TTL, ms  5 id of the terminal entry
--      6 id of the last tokens entry, or ''  7 its text  8 its ids  9 its seq
--      10 reason for the dead stream, or ''  11 length of the dead stream  12 worker
--      13 1: give the idempotency key free  14 number of tokens  15... fields of the terminal entry
-- Returns ok, fenced or gone; after the last two nothing was changed.
local job = ARGV[3]
if ARGV[6] ~= '' then
  local added = add(KEYS[2], true, ARGV[6],
    { 'event', 'tokens', 'seq', ARGV[9], 'ids', ARGV[8], 'text', ARGV[7] })
  if added ~= 'ok' then return added end
end
local terminal = {}
for i = 15, #ARGV do terminal[#terminal + 1] = ARGV[i] end
local added = add(KEYS[2], true, ARGV[5], terminal)
if added ~= 'ok' then return added end

local code = field(terminal, 'code')
if ARGV[10] ~= '' then
  local h = redis.call('HMGET', KEYS[1], 'attempt', 'crashes')
  bury(KEYS[4], ARGV[11], KEYS[3], ARGV[2], { 'job', job, 'reason', ARGV[10], 'code', code or '',
    'worker', ARGV[12], 'attempts', h[1] or 0, 'crashes', h[2] or 0 })
end
redis.call('HSET', KEYS[1], 'state', code and 'failed' or 'done', code and 'code' or 'reason',
  code or field(terminal, 'reason'), 'completion_tokens', ARGV[14], 'finished_ms', now_ms())
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[5])
remove(KEYS[3], ARGV[1], ARGV[2])
if ARGV[13] == '1' and KEYS[6] ~= KEYS[1] and redis.call('GET', KEYS[6]) == job then
  redis.call('DEL', KEYS[6])
end
return 'ok'
