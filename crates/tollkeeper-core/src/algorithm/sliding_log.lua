-- Sliding log: the twin of sliding_log.rs.
--
-- A log is a table: `len`, the number of stamps, and `stamp(log, index)`, the stamp at `index`, counted from 0.
-- So a decision reads only the few stamps it needs; functions that rewrite a log take its whole string.

-- The index of the first stamp less than a period old.
local function sliding_log_first_live(log, period, now)
  local dead, live = 0, log.len
  while dead < live do
    local middle = floor((dead + live) / 2)
    if log.stamp(log, middle) + period > now then
      live = middle
    else
      dead = middle + 1
    end
  end
  return live
end

-- Decides one request of `cost` at microsecond `now`. Returns whether it fits, whether the log proved that
-- the clock has stepped back, the first stamp that counts, how many count, and the stamp of the request.
local function sliding_log_step(quota, now, cost, log)
  local newest = log.len > 0 and log.stamp(log, log.len - 1) or 0
  local moved = newest > now + quota.period
  local first = sliding_log_first_live(log, quota.period, now)
  local used = log.len - first
  local allowed = cost <= quota.count and used + cost <= quota.count
  return allowed, moved, first, used, (moved or newest < now) and now or newest
end

-- The numbers behind a step: when the request can pass (0: never), when one more unit is free, when the key
-- has its whole quota again.
local function sliding_log_report(quota, now, cost, charged, log, allowed, moved, first, used, stamp)
  local count, period = quota.count, quota.period
  local total = used + (charged and cost or 0)
  local function leaves(index)
    if index >= used then
      return stamp + period
    end
    local seen = log.stamp(log, first + index)
    return (moved and seen > now and now or seen) + period
  end
  local remaining = total < count and count - total or 0
  local passes = 0
  if cost <= count then
    passes = allowed and now or leaves(used + cost - count - 1)
  end
  if total == 0 then
    return passes, now, now
  end
  return passes, leaves(total + remaining + 1 - count - 1), leaves(total - 1)
end

-- Whether an admission rewrites the log: after the clock has stepped back, or when half of it has expired.
local function sliding_log_rewrites(log, moved, first)
  return moved or first > 0 and 2 * first >= log.len
end

-- The stamps of an admission: `cost` times the same.
local function sliding_log_entry(stamp, cost)
  return rep(pack('>I7', stamp), cost)
end

-- The string of a log as a table that a step can read.
local function sliding_log_of(text)
  return {
    len = #text / 7,
    stamp = function(_, index)
      return (read('>I7', text, index * 7 + 1))
    end,
  }
end

-- The string of a log with `cost` appended; cost 0 only rewrites it, after the clock has stepped back.
local function sliding_log_write(text, moved, first, stamp, now, cost)
  if sliding_log_rewrites({ len = #text / 7 }, moved, first) then
    text = sub(text, first * 7 + 1)
  end
  if moved then
    -- Stamps ascend, so those after `now` are the last ones.
    local later = sliding_log_first_live(sliding_log_of(text), 0, now)
    text = sub(text, 1, later * 7) .. sliding_log_entry(now, #text / 7 - later)
  end
  return text .. sliding_log_entry(stamp, cost)
end

-- Gives back `part` of an earlier charge, if that is less than a period old. Removes the oldest live stamps.
local function sliding_log_give_back(quota, now, part, past, text)
  local _, moved, first, _, stamp = sliding_log_step(quota, now, 0, sliding_log_of(text))
  text = sliding_log_write(text, moved, first, stamp, now, 0)
  local log = sliding_log_of(text)
  -- A log without a stamp as new as that of the charge was moved when the clock stepped back: the stamp may have expired.
  local newest = log.len > 0 and log.stamp(log, log.len - 1) or 0
  if past.mark + quota.period > now and past.mark <= newest then
    first = sliding_log_first_live(log, quota.period, now)
    local gone = part < log.len - first and part or log.len - first
    text = sub(text, 1, first * 7) .. sub(text, (first + gone) * 7 + 1)
  end
  return text
end

-- Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
local function sliding_log_add(quota, now, more, text)
  local _, moved, first, used, stamp = sliding_log_step(quota, now, 0, sliding_log_of(text))
  local room = 2 * quota.count > used and 2 * quota.count - used or 0
  return sliding_log_write(text, moved, first, stamp, now, more < room and more or room)
end
