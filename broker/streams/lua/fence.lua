-- Take a job for one attempt, or say why not. After 'run' the attempt's number is in the reply
-- stream, so no earlier attempt can write there any more.
--
-- KEYS 1 job hash  2 reply stream  3 jobs stream of the entry  4 cancel mark  5 dead stream
--      6 idempotency key, or the job hash where there is none
-- ARGV 1 group  2 worker  3 entry id  4 job id  5 seed offered  6 prompt tokens  7 max attempts
--      8 TTL while unfinished, ms  9 reply TTL, ms  10 deadline after the entry's time, ms, or ''
--      11 tokens of progress that clear a job of suspicion  12 idempotency TTL, s, or ''
--      13 1: a suspect may run now  14 fingerprint of the request
--      15 1: asked before without getting the answer  16 length of the dead stream  17 tenant
-- Returns {verdict, ...}:
--   run | cancelled | deadline | dead | emptied (its tokens are lost), attempt, seed, last seq, crashes, ms to the deadline or ''
--   lost: another worker owns the entry      finished: it had ended before; entry removed
--   duplicate: another entry runs this job; entry removed    conflict: the same with another
--   request, which is in the dead stream now    taken, job: that job has the idempotency key, the
--   reader was told; entry removed           suspect: not now; nothing was changed
local stream, group, worker, entry, job = KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local where = stream .. ' ' .. entry

if owner_of(stream, group, entry) ~= worker then return { 'lost' } end

local h = redis.call('HMGET', KEYS[1], 'entry', 'state', 'crashes', 'base', 'released', 'worker',
  'fingerprint', 'seed', 'attempt')
local attempt, seq, ended, fresh = top_of(KEYS[2])
local emptied = attempt == 0 and is_emptied(KEYS[2])
if emptied then attempt = tonumber(h[9]) or 0 end

-- Did an earlier question take the attempt, and only its answer was lost?
local is_taken = ARGV[15] == '1' and fresh and h[1] == where and h[2] == 'running'
  and h[6] == worker

-- 1. another entry stands for the same job
local active = h[2] == 'running' or h[2] == 'queued'
if h[1] and h[1] ~= where and (ended or (active and is_alive(h[1], group))) then
  local verdict = 'duplicate'
  if h[7] and h[7] ~= ARGV[14] then
    verdict = 'conflict'
    bury(KEYS[5], ARGV[16], stream, entry, { 'job', job, 'worker', worker, 'attempts', 0,
      'code', 'conflict', 'reason', 'the job id is taken by another request' })
  end
  remove(stream, group, entry)
  return { verdict }
end
if ended then
  redis.call('DEL', KEYS[4])
  remove(stream, group, entry)
  return { 'finished' }
end

-- 2. another job has the idempotency key
if ARGV[12] ~= '' then
  local holder = redis.call('GET', KEYS[6])
  if holder and holder ~= job then  -- whose reply may be gone by now
    if emptied then redis.call('DEL', KEYS[2]) end
    add(KEYS[2], false, (attempt + 1) .. '-' .. (seq + 1), { 'event', 'error', 'code', 'conflict',
      'message', 'idempotency_key is taken by job ' .. holder, 'field', 'idempotency_key',
      'retry', 'false', 'job', holder })
    redis.call('HSET', KEYS[1], 'state', 'failed', 'code', 'conflict', 'entry', where,
      'finished_ms', now_ms())
    redis.call('PEXPIRE', KEYS[1], ARGV[9])
    redis.call('PEXPIRE', KEYS[2], ARGV[9])
    redis.call('DEL', KEYS[4])
    remove(stream, group, entry)
    return { 'taken', holder }
  end
  redis.call('SET', KEYS[6], job, 'EX', ARGV[12])
end

-- 3. who is to blame for earlier attempts: a job that got far between two crashes is not
local crashes = tonumber(h[3] or 0)
if attempt > 0 and h[5] ~= '1' and not is_taken then
  local advanced = seq - tonumber(h[4] or 0) >= tonumber(ARGV[11])
  crashes = (advanced or crashes == 0) and 1 or crashes + 1
end
local verdict, left = 'run', ''
if ARGV[10] ~= '' then
  left = tonumber(string.match(entry, '^(%d+)')) + ARGV[10] - now_ms()
  if left <= 0 then verdict = 'deadline' end
end
if redis.call('EXISTS', KEYS[4]) == 1 then verdict = 'cancelled' end
if verdict == 'run' and crashes >= tonumber(ARGV[7]) then verdict = 'dead' end
if verdict == 'run' and emptied and attempt > 0 then verdict = 'emptied' end
if is_taken then return { verdict, attempt, h[8], seq, crashes, left } end
if verdict == 'run' and crashes > 1 and ARGV[13] ~= '1' then return { 'suspect' } end

-- 4. the fence
attempt = attempt + 1
if emptied then redis.call('DEL', KEYS[2]) end  -- as large as the ids may be that it had
redis.call('HSETNX', KEYS[1], 'seed', ARGV[5])
local seed = redis.call('HGET', KEYS[1], 'seed')
local added = add(KEYS[2], false, attempt .. '-0', { 'event', 'started', 'attempt', attempt,
  'worker', worker, 'seed', seed, 'prompt_tokens', ARGV[6], 'seq', seq })
if added ~= 'ok' then return { 'lost' } end
redis.call('HSET', KEYS[1], 'state', 'running', 'entry', where, 'attempt', attempt,
  'worker', worker, 'crashes', crashes, 'base', seq, 'released', '0', 'prompt_tokens', ARGV[6],
  'started_ms', now_ms(), 'fingerprint', ARGV[14], 'tenant', ARGV[17])
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
return { verdict, attempt, seed, seq, crashes, left }
