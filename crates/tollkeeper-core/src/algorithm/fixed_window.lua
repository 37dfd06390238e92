-- Fixed window: the twin of fixed_window.rs. A state is `count, window`; `count` is nil if none is stored.

-- The state at `now`, and whether it was moved because the clock has stepped back.
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

-- Decides one request of `cost` at microsecond `now`; the windows begin `shift` microseconds early.
local function fixed_window_step(quota, now, cost, shift, count, window)
  local moved
  count, window, moved = fixed_window_current(quota, now, shift, count, window)
  if cost <= quota.count and count + cost <= quota.count then
    return true, count + cost, moved, count, window
  end
  return false, count, moved, count, window
end

-- Gives back `part` of an earlier charge, if its window has not ended.
local function fixed_window_give_back(quota, now, shift, part, past, count, window)
  count, window = fixed_window_current(quota, now, shift, count, window)
  if past.mark ~= window then
    return count, window
  end
  return part < count and count - part or 0, window
end

-- Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
local function fixed_window_add(quota, now, shift, more, count, window)
  count, window = fixed_window_current(quota, now, shift, count, window)
  local most = 2 * quota.count
  most = most > count and most or count
  count = count + more
  return count < most and count or most, window
end

-- Grants up to `want` units in advance, at most half of what is left in this window. Returns them, and the state with
-- them charged.
local function fixed_window_lease(quota, now, want, _, shift, count, window)
  count, window = fixed_window_current(quota, now, shift, count, window)
  local fits = quota.count - count
  if fits <= 0 then
    return 0, count, window
  end
  local grant = fits < 4 and 1 or floor(fits / 2)
  grant = want < grant and want or grant
  return grant, count + grant, window
end

-- The microsecond at which the state no longer affects a decision.
local function fixed_window_fresh_at(quota, shift, _, window)
  return (window + 1) * quota.period - shift
end
