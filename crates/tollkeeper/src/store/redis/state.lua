-- Encodes states as bytes: the twin of state.rs. A state is packed into 12 bytes if it fits, because that is the
-- longest value that Redis holds in its smallest allocation. Otherwise it takes a few bytes more.
--
-- In a packed state, `x` is the number that a charge adds to, `y` is its time, and `z` is the rest:
-- level, at; count, window; cur, window, prev.

-- Reads a quota as the table that its algorithm expects, and returns the position behind it in `bytes`.
local function quota_read(bytes, at, now)
  local kind, tick, count, burst, period
  kind, tick, count, burst, period, at = read('>BI3I7I7I7', bytes, at)
  if kind <= 2 then
    return {
      kind = kind, tick = tick, now = floor(now / tick), count = count, period = period,
      burst = burst, capacity = burst * period, fresh_at = meter_fresh_at,
      short = '>I7I5', below = 1099511627776, long = '>I7I7', size = 14,
    }, at
  end
  if kind == 3 then
    return {
      kind = kind, tick = tick, now = now, count = count, period = period,
      step = fixed_window_step, fresh_at = fixed_window_fresh_at,
      short = '>I6I6', below = 281474976710656, long = '>I6I7', size = 13,
    }, at
  end
  if kind == 4 then
    return {
      kind = kind, tick = tick, now = floor(now / tick), count = count, period = period,
      step = sliding_window_step, fresh_at = sliding_window_fresh_at,
      short = '>I6I3I3', below = 16777216, long = '>I6I6I6', size = 18,
    }, at
  end
  return { kind = kind, count = count, period = period }, at
end

-- Decodes a state. A value that cannot be one (by its length, or by numbers that no step produces) is
-- treated as missing: `x` is nil.
local function state_read(quota, bytes)
  local x, y, z
  if #bytes == 12 then
    y, x, z = read(quota.short, bytes)
  elseif #bytes == quota.size then
    y, x, z = read(quota.long, bytes)
    if quota.kind == 4 and (x + z) * quota.period >= 9007199254740992 or x >= 9007199254740992 then
      x = nil
    end
  end
  return x, y, z
end

-- Encodes a state.
local function state_bytes(quota, x, y, z)
  local short = x < quota.below and (quota.kind ~= 4 or z < quota.below)
  return pack(short and quota.short or quota.long, y, x, z)
end

-- The expiry of a key whose state equals a fresh one at that microsecond: within the second after it, as
-- milliseconds in text. Formatting is slow, and most keys of a batch expire in the same second, so the text is cached.
local expiry_second, expiry_text
local function expiry(micros)
  local second = micros - micros % 1000000
  if second ~= expiry_second then
    expiry_second, expiry_text = second, format('%d000', second / 1000000 + 1)
  end
  return expiry_text
end

-- Writes a value that expires when it equals a fresh state.
local function put(name, text, fresh)
  call('SET', name, text, 'PXAT', expiry(fresh))
end

-- Writes a packed state.
local function state_save(name, quota, shift, x, y, z)
  put(name, state_bytes(quota, x, y, z), quota.fresh_at(quota, shift, x, y, z) * quota.tick)
end
