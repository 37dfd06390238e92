-- Decides tolls of plain buckets in order, each charging all its limits or none: a fast path for batches in which no
-- key is used twice. What it decides, writes and returns is what check.lua would, from the same arguments.
--
-- KEYS, ARGV and the result are those of check.lua; bucket.lua says what a plain bucket is.

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local arg, keys, states = ARGV[1], KEYS, call('MGET', unpack(KEYS))
local nonce, _, quotas = read('>I6HH', arg)
-- The numbers of the quota that was used last: most dues of a batch have the same. `ticks` is the time in its ticks.
local number, tick, count, burst, period, ticks
-- Whether all states have 12 bytes, and the bytes that stand for a missing state.
local even, none = true, '\0\0\0\0\0\0\0\0\0\0\0\0'
-- The expiry that was written last, as a time in whole seconds and as text: most keys expire in the same second.
local second, expires
local refused, toll, admitted, earlier = '', 1, true, nil
local pos, size = 11 + 25 * quotas, #arg
while pos <= size do
  local key, quota, more, cost
  key, quota, more, cost, pos = read('>HHBI4', arg, pos)
  if quota ~= number then
    number = quota
    tick, count, burst, period = read('>I3I7I7I7', arg, 25 * quota - 13)
    ticks = (now - now % tick) / tick
  end
  local bytes, level, at = states[key], nil, nil
  if bytes and #bytes == 12 then
    at, level = read('>I7I5', bytes)
  else
    if bytes and #bytes == 14 then
      at, level = read('>I7I7', bytes)
    end
    if level and level < 9007199254740992 then
      even = false
    else
      -- Missing, or no state of a bucket, which is treated as missing.
      states[key], level = none, nil
    end
  end
  local allowed, after, moved
  allowed, after, moved, level, at = meter_step(count, burst, period, ticks, cost, level, at)
  admitted = admitted and allowed
  if more == 1 then
    earlier = { key, count, tick, level, after, at, moved, earlier }
  else
    -- The verdict on the toll is known: write its last due, which is still in the variables, then the earlier ones.
    local count, tick = count, tick
    while key do
      if admitted or moved then
        level = admitted and after or level
        local fresh = meter_drained_at(count, tick, at, level) * tick
        fresh = fresh - fresh % 1000000
        if fresh ~= second then
          second, expires = fresh, format('%d000', fresh / 1000000 + 1)
        end
        call('SET', keys[key], pack(level < 1099511627776 and '>I7I5' or '>I7I7', at, level), 'PXAT', expires)
      end
      key = nil
      if earlier then
        key, count, tick, level, after, at, moved, earlier = unpack(earlier, 1, 8)
      end
    end
    if not admitted then
      refused = refused .. pack('>H', toll)
    end
    toll, admitted = toll + 1, true
  end
end
if not even then
  for key = 1, #states do
    states[key] = pack('>Bc0', #states[key], states[key])
  end
end
return pack('>I6I7HBc0', nonce, now, #refused / 2, even and 1 or 0, refused .. concat(states))
