-- Decides tolls in order, each on the state that the tolls before it left. Each charges all its limits or none.
--
-- KEYS     each state that the tolls need, once: first those that are packed, then logs and slots
-- ARGV[1]  the nonce, the number of packed keys, the number of quotas, the quotas, and the dues: see wire.rs
-- Returns  one string, because a single element of a list reply takes longer than the whole string: the nonce, the
--          time, the number of refused tolls, the form of the states, the numbers of the refused tolls, the packed
--          states as they were read, and the records of logs and slots, in the order of the dues

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local arg, keys = ARGV[1], KEYS
local nonce, packed, last, start = read('>I6HH', arg)
local states = packed > 0 and call('MGET', unpack(keys, 1, packed)) or {}
local quotas = {}
for number = 1, last do
  quotas[number], start = quota_read(arg, start, now)
end

-- States of keys that several tolls of this batch use: they are written once, at the end. All other
-- states are written when their toll is decided.
local held
-- The records of logs and slots.
local records
-- Whether all states have 12 bytes, and the bytes that stand for a missing state.
local even, none = true, '\0\0\0\0\0\0\0\0\0\0\0\0'

-- Decides the due at `pos` and the dues of its toll after it. `admitted` is whether all dues before it
-- allow the toll. Returns whether the toll is admitted, and where the next toll begins. The recursion
-- keeps each due's variables on the stack until the verdict is known, which is cheaper than a table.
local function decide(pos, admitted)
  local key, number, shape, cost
  key, number, shape, cost, pos = read('>HHBI4', arg, pos)
  local quota, shift, hold, taker = quotas[number], 0, 0, nil
  local kind, charging, shared = quota.kind, true, false
  local more, enforced = false, true
  if shape == 1 then
    -- Most dues have no flag but this one: another due of the toll follows.
    more = true
  elseif shape > 0 then
    more, enforced, charging, shared = shape % 2 == 1, shape % 4 < 2, shape % 8 < 4, shape % 32 >= 16
    admitted = admitted and shape < 32
    if shape % 16 >= 8 then
      shift, hold, taker, pos = read('>I7I7c8', arg, pos)
    end
  end
  -- A cost of 0 is decided like a cost of 1, but is never refused and charges nothing.
  local asked = cost > 0 and cost or 1
  local state = shared and held and held[key]
  local allowed, moved, after, x, y, z, record
  if kind <= 4 then
    local bytes = not state and states[key]
    if state then
      x, y, z = state.x, state.y, state.z
    elseif bytes then
      x, y, z = state_read(quota, bytes)
      even = even and (not x or #bytes == 12)
    end
    if not x then
      -- Missing, or no state of this algorithm.
      states[key] = none
    end
    if kind <= 2 then
      allowed, after, moved, x, y = meter_step(quota.count, quota.burst, quota.period, quota.now, asked, x, y)
    else
      allowed, after, moved, x, y, z = quota.step(quota, quota.now, asked, shift, x, y, z)
    end
    if hold > 0 and meter_departs(quota, quota.now, x) * quota.tick - now >= hold then
      allowed = false
    end
  else
    records = records or {}
    record = #records + 1
    records[record] = ''
    if kind == 5 then
      state = state or log_open(keys[key])
      allowed, moved, x, y, z = sliding_log_step(quota, now, asked, state)
    else
      state = state or slots_open(keys[key])
      allowed, moved, x, y = concurrency_step(quota, now, state.text)
    end
  end
  allowed = allowed or cost == 0
  admitted = admitted and (allowed or not enforced)
  if more then
    admitted, pos = decide(pos, admitted)
  end

  -- The verdict is known: write the charge, or only the correction after the clock stepped back.
  local charged = charging and admitted and allowed and cost > 0
  local writes = charged or charging and moved
  if kind == 5 then
    local passes, next, fresh = sliding_log_report(quota, now, asked, charged, state, allowed, moved, x, y, z)
    records[record] = pack('>BI7I7I7I7I7', allowed and 1 or 0, y, z, passes, next, fresh)
    if writes then
      log_enter(state, moved, x, z, now, charged and cost or 0)
    end
  elseif kind == 6 then
    records[record] = pack('>BI7I7', allowed and 1 or 0, x, y)
    if writes then
      state.text = concurrency_write(quota, now, state.text, charged and taker or nil)
    end
  elseif writes then
    x = charged and after or x
    if shared then
      state = state or {}
      state.x, state.y, state.z, state.shift = x, y, z, shift
    else
      state_save(keys[key], quota, shift, x, y, z)
    end
  end
  if shared then
    if writes then
      state.quota = quota
    end
    if state then
      held = held or {}
      held[key] = state
    end
  elseif writes and kind > 4 then
    wide_save(keys[key], state, quota)
  end
  return admitted, pos
end

--lease: functions
local refused, toll, size = {}, 0, #arg
while start <= size do
  toll = toll + 1
  local admitted
  admitted, start = decide(start, true)
  if not admitted then
    refused[#refused + 1] = pack('>H', toll)
  end
end
if held then
  for key, state in pairs(held) do
    local quota = state.quota
    if quota and quota.kind > 4 then
      wide_save(keys[key], state, quota)
    elseif quota then
      state_save(keys[key], quota, state.shift, state.x, state.y, state.z)
    end
  end
end

-- If all states have 12 bytes, they are returned as they are. Otherwise each has its length before it.
if not even then
  for key = 1, packed do
    states[key] = pack('>Bc0', #states[key], states[key])
  end
end
return pack('>I6I7HB', nonce, now, #refused, even and 1 or 0) .. concat(refused)
  .. concat(states) .. (records and concat(records) or '')
