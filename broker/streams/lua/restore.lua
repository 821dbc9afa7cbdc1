-- Redis lost data while a job ran: write what is missing at the end of its reply again, under the
-- same ids. The ids refuse what is there already.
--
-- KEYS 1 job hash  2 reply stream
-- ARGV 1 worker  2 attempt  3 seed  4 TTL while unfinished, ms  5 prompt tokens
--      6 stream and id of the jobs entry, with a space between
--      7... for each entry: id, number of fields and values, the fields and values
-- Returns how many entries were written.
redis.call('HSET', KEYS[1], 'state', 'running', 'attempt', ARGV[2], 'worker', ARGV[1],
  'seed', ARGV[3], 'prompt_tokens', ARGV[5], 'entry', ARGV[6], 'started_ms', now_ms())
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local i, written = 7, 0
while i <= #ARGV do
  local fields = {}
  for k = i + 2, i + 1 + ARGV[i + 1] do fields[#fields + 1] = ARGV[k] end
  if add(KEYS[2], false, ARGV[i], fields) == 'ok' then written = written + 1 end
  i = i + 2 + ARGV[i + 1]
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return written
