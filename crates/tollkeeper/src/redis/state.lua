-- States as bytes: the twin of state.rs. A state is packed into 12 bytes if it can be, because that is
-- what Redis holds in the smallest piece of memory, and else into a few more.
--
-- A value that cannot be a state (by its length, or by numbers that no step leaves behind) is none.

local function meter_encode(level, at)
  return level < 1099511627776 and pack('>I7I5', at, level) or pack('>I7I7', at, level)
end

local function meter_decode(_, bytes)
  local at, level
  if #bytes == 12 then
    at, level = read('>I7I5', bytes)
    return level, at
  end
  if #bytes == 14 then
    at, level = read('>I7I7', bytes)
    if level < 9007199254740992 then
      return level, at
    end
  end
end

local function fixed_window_encode(count, window)
  return count < 281474976710656 and pack('>I6I6', window, count) or pack('>I6I7', window, count)
end

local function fixed_window_decode(_, bytes)
  local window, count
  if #bytes == 12 then
    window, count = read('>I6I6', bytes)
    return count, window
  end
  if #bytes == 13 then
    window, count = read('>I6I7', bytes)
    if count < 9007199254740992 then
      return count, window
    end
  end
end

local function sliding_window_encode(cur, window, prev)
  if cur < 16777216 and prev < 16777216 then
    return pack('>I6I3I3', window, prev, cur)
  end
  return pack('>I6I6I6', window, prev, cur)
end

local function sliding_window_decode(quota, bytes)
  local window, prev, cur
  if #bytes == 12 then
    window, prev, cur = read('>I6I3I3', bytes)
    return cur, window, prev
  end
  if #bytes == 18 then
    window, prev, cur = read('>I6I6I6', bytes)
    if (prev + cur) * quota.period < 9007199254740992 then
      return cur, window, prev
    end
  end
end

-- A quota as its algorithm reads it, and where the next thing in `bytes` begins.
local function quota_read(bytes, at, now)
  local kind, tick, count, burst, period
  kind, tick, count, burst, period, at = read('>BI3I7I7I7', bytes, at)
  if kind <= 2 then
    return {
      kind = kind, tick = tick, now = floor(now / tick), count = count, period = period,
      burst = burst, capacity = burst * period, fill = ceil(burst * period / count),
      last = floor(9007199254740992 / tick),
      step = meter_step, fresh_at = meter_fresh_at, encode = meter_encode, decode = meter_decode,
    }, at
  end
  if kind == 3 then
    return {
      kind = kind, tick = tick, now = now, count = count, period = period,
      step = fixed_window_step, fresh_at = fixed_window_fresh_at,
      encode = fixed_window_encode, decode = fixed_window_decode,
    }, at
  end
  if kind == 4 then
    return {
      kind = kind, tick = tick, now = floor(now / tick), count = count, period = period,
      step = sliding_window_step, fresh_at = sliding_window_fresh_at,
      encode = sliding_window_encode, decode = sliding_window_decode,
    }, at
  end
  return { kind = kind, count = count, period = period }, at
end

-- When a key goes whose state is as good as fresh at that microsecond: within the second after it, as
-- milliseconds in text. Keys of one second share the text, because to write a number out takes long.
local expiries = {}
local function expiry(micros)
  local second = floor(micros / 1000000) + 1
  local text = expiries[second]
  if not text then
    text = format('%.0f000', second)
    expiries[second] = text
  end
  return text
end
