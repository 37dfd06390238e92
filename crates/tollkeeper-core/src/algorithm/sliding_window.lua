-- Sliding window counter: the twin of sliding_window.rs. A state is `cur, window, prev`; `cur` is nil if none
-- is stored.

-- The state at `now`, and whether it was moved because the clock has stepped back.
local function sliding_window_current(quota, now, cur, window, prev)
  local current = floor(now / quota.period)
  if not cur or window + 1 < current then
    return 0, current, 0, false
  end
  if window > current + 1 then
    return cur, current, prev, true
  end
  if window >= current then
    return cur, window, prev, false
  end
  return 0, current, cur, false
end

-- Decides one request of `cost` at tick `now`.
local function sliding_window_step(quota, now, cost, _, cur, window, prev)
  local moved
  cur, window, prev, moved = sliding_window_current(quota, now, cur, window, prev)
  local period = quota.period
  local elapsed = now - window * period
  if elapsed < 0 then
    elapsed = 0
  end
  -- First whether this window has room, so that no difference is negative, then the weighted previous count.
  if cost <= quota.count and cur + cost <= quota.count
    and prev * (period - elapsed) <= (quota.count - cur - cost) * period then
    return true, cur + cost, moved, cur, window, prev
  end
  return false, cur, moved, cur, window, prev
end

-- Gives back `part` of an earlier charge: to the window it was made in, while that window still counts.
local function sliding_window_give_back(quota, now, _, part, past, cur, window, prev)
  cur, window, prev = sliding_window_current(quota, now, cur, window, prev)
  if past.mark == window then
    cur = part < cur and cur - part or 0
  elseif past.mark + 1 == window then
    prev = part < prev and prev - part or 0
  end
  return cur, window, prev
end

-- Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
local function sliding_window_add(quota, now, _, more, cur, window, prev)
  cur, window, prev = sliding_window_current(quota, now, cur, window, prev)
  local most = 2 * quota.count
  most = most > cur and most or cur
  cur = cur + more
  return cur < most and cur or most, window, prev
end

-- Grants up to `want` units in advance, at most half of what is left now. Returns them, and the state with them
-- charged.
local function sliding_window_lease(quota, now, want, _, _, cur, window, prev)
  cur, window, prev = sliding_window_current(quota, now, cur, window, prev)
  local period = quota.period
  local elapsed = now - window * period
  if elapsed < 0 then
    elapsed = 0
  end
  local left = quota.count * period - cur * period - prev * (period - elapsed)
  local fits = left > 0 and floor(left / period) or 0
  if fits == 0 then
    return 0, cur, window, prev
  end
  local grant = fits < 4 and 1 or floor(fits / 2)
  grant = want < grant and want or grant
  return grant, cur + grant, window, prev
end

-- The tick at which the state no longer affects a decision.
local function sliding_window_fresh_at(quota, _, cur, window)
  return (window + (cur > 0 and 2 or 1)) * quota.period
end
