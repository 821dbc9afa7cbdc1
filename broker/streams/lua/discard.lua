-- Take a job out of the queue whose keys are not what they should be, so that nothing can be told
-- to its reader. The request is kept in the dead stream.
--
-- KEYS 1 jobs stream of the entry  2 dead stream
-- ARGV 1 group  2 worker  3 entry id  4 job id  5 reason  6 length of the dead stream
-- Returns 1, or 0 if the entry was not ours.
if owner_of(KEYS[1], ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
bury(KEYS[2], ARGV[6], KEYS[1], ARGV[3], { 'job', ARGV[4], 'reason', ARGV[5],
  'code', 'internal', 'worker', ARGV[2], 'attempts', 0 })
remove(KEYS[1], ARGV[1], ARGV[3])
return 1
