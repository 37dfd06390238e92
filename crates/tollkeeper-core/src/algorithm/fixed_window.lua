-- Fixed window: the twin of fixed_window.rs. A state is `count, window`, and no count if there is none.

-- The state as it stands, and whether it had to be moved.
local function fixed_window_current(quota, now, shift, count, window)
  local current = floor((now + shift) / quota.period)
  if not count or window < current then
    return 0, current, false
  end
  if window > current + 1 then
    return count, current, true
  end
  return count, window, false
end

-- Decides one request of `cost` at microsecond `now`; the windows begin `shift` early.
local function fixed_window_step(quota, now, cost, shift, count, window)
  local moved
  count, window, moved = fixed_window_current(quota, now, shift, count, window)
  if cost <= quota.count and count + cost <= quota.count then
    return true, count + cost, moved, count, window
  end
  return false, count, moved, count, window
end

-- Gives back `part` of an earlier charge, if its window still runs.
local function fixed_window_give_back(quota, now, shift, part, past, count, window)
  count, window = fixed_window_current(quota, now, shift, count, window)
  if past.mark ~= window then
    return count, window
  end
  return part < count and count - part or 0, window
end

-- Charges `more` after the fact, above the limit if need be, but never beyond twice the quota.
local function fixed_window_add(quota, now, shift, more, count, window)
  count, window = fixed_window_current(quota, now, shift, count, window)
  local most = 2 * quota.count
  most = most > count and most or count
  count = count + more
  return count < most and count or most, window
end

-- The microsecond in which the state is as good as a fresh one.
local function fixed_window_fresh_at(quota, shift, _, window)
  return (window + 1) * quota.period - shift
end
