-- Decides one toll of one plain bucket: the most common call, and a fast path for it. What it decides, writes and
-- returns is what check.lua would, from the same arguments.
--
-- KEYS, ARGV and the result are those of check.lua. A plain bucket is a token or leaky bucket that is enforced and
-- charged, without a delay.

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
-- One key, one quota and one due: only the numbers of the quota and the cost matter.
local nonce, _, tick, count, burst, period, _, cost = read('>I6I5I3I7I7I7I5I4', ARGV[1])
local key = KEYS[1]
local bytes, even, level, at = pcall('GET', key) or '', 1, nil, nil
if #bytes == 12 then
  at, level = read('>I7I5', bytes)
else
  if #bytes == 14 then
    at, level = read('>I7I7', bytes)
  end
  if level and level < 9007199254740992 then
    bytes, even = pack('>Bc0', 14, bytes), 0
  else
    -- Missing, or no state of a bucket, which is treated as missing.
    bytes, level = '\0\0\0\0\0\0\0\0\0\0\0\0', nil
  end
end
local allowed, after, moved
allowed, after, moved, level, at = meter_step(count, burst, period, (now - now % tick) / tick, cost, level, at)
if allowed or moved then
  local fresh = meter_drained_at(count, tick, at, after) * tick
  local form = after < 1099511627776 and '>I7I5' or '>I7I7'
  call('SET', key, pack(form, at, after), 'PXAT', format('%d000', fresh / 1000000 + 1))
end
if allowed then
  return pack('>I6I7HBc0', nonce, now, 0, even, bytes)
end
return pack('>I6I7HBHc0', nonce, now, 1, even, 1, bytes)
