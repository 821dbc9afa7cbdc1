-- Shared by the scripts; put in front of each of them. All keys of a queue are in one slot.

-- Server time in ms.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- How much one answer to a worker may carry, and how many entries are looked at in one go.
local MAX_BYTES, PAGE = 4194304, 16

local function size_of(fields)
  local size = 0
  for i = 1, #fields do size = size + #fields[i] end
  return size
end

-- Owner of a pending entry, or false.
local function owner_of(stream, group, entry)
  local p = redis.call('XPENDING', stream, group, entry, entry, 1)
  return p[1] and p[1][2] or false
end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return false
end

-- Last state of a reply stream: attempt, seq of the last token, has it ended, is it only started.
-- 0, 0, false, false if there is none. A `started` entry has id seq 0 and says in `seq` which token
-- came before it.
local function top_of(out)
  local last = redis.call('XREVRANGE', out, '+', '-', 'COUNT', 1)[1]
  if not last then return 0, 0, false, false end
  local attempt, seq = string.match(last[1], '^(%d+)-(%d+)$')
  local event = field(last[2], 'event')
  if event == 'started' then seq = field(last[2], 'seq') or 0 end
  return tonumber(attempt), tonumber(seq) or 0, event == 'done' or event == 'error', event == 'started'
end

-- Somebody took all entries out of a reply stream by hand: it refuses the ids it had.
local function is_emptied(out)
  return redis.call('EXISTS', out) == 1 and redis.call('XLEN', out) == 0
end

-- XADD that answers 'ok', 'fenced' (a later attempt has written) or 'gone' (no such stream).
-- Any other error ends the script before anything else is written.
local function add(out, must_exist, id, fields)
  local args = { 'XADD', out }
  if must_exist then args[3] = 'NOMKSTREAM' end
  args[#args + 1] = id
  for i = 1, #fields do args[#args + 1] = fields[i] end
  local reply = redis.pcall(unpack(args))
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'equal or smaller', 1, true) then return 'fenced' end
    error(reply.err)
  end
  return reply and 'ok' or 'gone'
end

-- Take an entry out of the queue. Its group may be gone after a data loss: no reason to stop.
local function remove(stream, group, entry)
  redis.pcall('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Is the entry that a job hash names queued or pending? `where` is '<stream> <entry id>'.
local function is_alive(where, group)
  local stream, entry = string.match(where, '^(%S+) (%S+)$')
  if not stream then return false end
  if redis.call('XRANGE', stream, entry, entry)[1] then return true end
  local p = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  return not p.err and p[1] ~= nil
end

-- Keep a whole request in the dead stream, its fields as `request.<name>`.
local function bury(dead, max_len, stream, entry, about)
  local args = { 'XADD', dead, 'MAXLEN', '~', max_len, '*', 'stream', stream, 'entry', entry }
  for i = 1, #about do args[#args + 1] = about[i] end
  local got = redis.call('XRANGE', stream, entry, entry)[1]
  local fields = got and got[2] or {}
  for i = 1, math.min(#fields, 7000), 2 do  -- Lua can pass about 8,000 arguments
    args[#args + 1] = 'request.' .. fields[i]
    args[#args + 1] = fields[i + 1]
  end
  redis.call(unpack(args))
end
