-- The meter: the twin of meter.rs, which explains the algorithm. Comments here are about doubles.
--
-- A state is `level, at`; `level` is nil if none is stored. Every number is whole and below 2^53, where a
-- double is exact. A quotient of two such numbers may be rounded, but never across a whole number, so
-- comparing it with one, `floor` and `%` are exact too.

-- The functions of a check take the numbers of a quota one by one: a table for them would take a script that decides one
-- request as long as the arithmetic itself.

-- The state at tick `now`, and whether it was moved because the clock has stepped back.
local function meter_drained(count, capacity, now, level, at)
  if not level then
    return 0, now, false
  end
  -- Rust compares at - now with the quotient, rounded up. A product too large to be exact is far above the capacity.
  local moved = at > now and (at - now - 1) * count >= capacity
  if moved then
    at = now
  end
  if at >= now then
    return level, at, moved
  end
  -- Rust saturates the product, which could exceed 2^53 and become inexact here: compare the quotient.
  if now - at >= level / count then
    return 0, now, moved
  end
  return level - (now - at) * count, now, moved
end

-- The tick at which `level` has drained, starting at `at`; at most the last tick before 2^53 µs. `tick` is its length.
local function meter_drained_at(count, tick, at, level)
  -- The quotient, rounded up: the remainder of -level is what is missing to the next multiple of the count.
  local drained = at + (level + -level % count) / count
  return drained * tick < 9007199254740992 and drained or (9007199254740992 - 9007199254740992 % tick) / tick
end

-- Decides one request of `cost` at tick `now`. Returns whether it fits, the level with it charged, whether
-- the state was moved, and the state before the request.
local function meter_step(count, burst, period, now, cost, level, at)
  local moved
  level, at, moved = meter_drained(count, burst * period, now, level, at)
  -- cost <= burst comes first: it keeps the product below the capacity, and the sum below 2^53.
  if cost <= burst and level + cost * period <= burst * period then
    return true, level + cost * period, moved, level, at
  end
  return false, level, moved, level, at
end

-- Gives back `part` of an earlier charge, but only units that cannot have drained since.
local function meter_give_back(quota, now, _, part, past, level, at)
  local age = (at > now and at or now) - past.mark
  level, at = meter_drained(quota.count, quota.capacity, now, level, at)
  local undrained = past.cost * quota.period
  local rate = quota.count > past.count and quota.count or past.count
  if age < 0 or age >= undrained / rate then
    return level, at
  end
  undrained = undrained - age * rate
  part = part * quota.period
  part = part < undrained and part or undrained
  return part < level and level - part or 0, at
end

-- Charges `more` units after admission, above the limit if necessary, but never beyond twice the capacity.
local function meter_add(quota, now, _, more, level, at)
  level, at = meter_drained(quota.count, quota.capacity, now, level, at)
  local most = 2 * quota.capacity
  most = most > level and most or level
  -- A product too large to be exact is far above `most`, so its error does not matter.
  level = more * quota.period + level
  return level < most and level or most, at
end

-- Grants up to `want` units in advance, at most an eighth of what fits, on a level of at least `raise`. Returns them,
-- and the state with them charged.
local function meter_lease(quota, now, want, raise, _, level, at)
  level, at = meter_drained(quota.count, quota.capacity, now, level, at)
  local base = level > raise and level or raise
  local fits = base < quota.capacity and floor((quota.capacity - base) / quota.period) or 0
  if fits == 0 then
    return 0, level, at
  end
  local grant = fits < 16 and 1 or floor(fits / 8)
  grant = want < grant and want or grant
  return grant, base + grant * quota.period, at
end

-- The tick at which the state no longer affects a decision.
local function meter_fresh_at(quota, _, level, at)
  return meter_drained_at(quota.count, quota.tick, at, level)
end

-- The tick at which a request that is queued now leaves the queue: when all before it have left.
local function meter_departs(quota, now, level)
  return meter_drained_at(quota.count, quota.tick, now, level)
end
