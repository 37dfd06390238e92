-- Concurrency: the twin of concurrency.rs.
--
-- Slots are a string of 22 bytes for each: the id of its holder (8 bytes, never a number), the microsecond at
-- which it was taken or renewed, and the one at which it expires (7 bytes each).

-- The slot at `now`; nil if it has expired.
local function concurrency_seen(now, taken, expires)
  if taken > now + (expires - taken) then
    taken, expires = now, now + (expires - taken)
  end
  if expires > now then
    return taken, expires
  end
end

-- Decides whether one more slot can be taken at microsecond `now`. Returns that, whether some slot proved
-- that the clock has stepped back, how many are held, and when the first expires (0 if none is held).
local function concurrency_step(quota, now, slots)
  local moved, held, first = false, 0, 0
  for at = 1, #slots, 22 do
    local _, taken, expires = read('>c8I7I7', slots, at)
    local seen_taken, seen_expires = concurrency_seen(now, taken, expires)
    if seen_taken then
      held = held + 1
      first = (first == 0 or seen_expires < first) and seen_expires or first
      moved = moved or seen_taken ~= taken
    end
  end
  return held < quota.count, moved, held, first
end

-- Adds the slot of `taker`; nil only rewrites the slots, after the clock has stepped back.
local function concurrency_write(quota, now, slots, taker)
  local kept = {}
  for at = 1, #slots, 22 do
    local id, taken, expires = read('>c8I7I7', slots, at)
    taken, expires = concurrency_seen(now, taken, expires)
    if taken then
      kept[#kept + 1] = pack('>c8I7I7', id, taken, expires)
    end
  end
  if taker then
    kept[#kept + 1] = pack('>c8I7I7', taker, now, now + quota.period)
  end
  return concat(kept)
end

-- Releases a slot; false if it was no longer held.
local function concurrency_release(now, slots, who)
  local kept, held = {}, false
  for at = 1, #slots, 22 do
    local id, taken, expires = read('>c8I7I7', slots, at)
    if id ~= who then
      kept[#kept + 1] = sub(slots, at, at + 21)
    elseif concurrency_seen(now, taken, expires) then
      held = true
    end
  end
  return concat(kept), held
end

-- Restarts the time to live of a slot from now; false if it was no longer held.
local function concurrency_renew(now, slots, who)
  for at = 1, #slots, 22 do
    local id, taken, expires = read('>c8I7I7', slots, at)
    if id == who and concurrency_seen(now, taken, expires) then
      local slot = pack('>c8I7I7', id, now, now + (expires - taken))
      return sub(slots, 1, at - 1) .. slot .. sub(slots, at + 22), true
    end
  end
  return slots, false
end

-- The microsecond at which the last slot expires; 0 if none is held.
local function concurrency_fresh_at(slots)
  local fresh = 0
  for at = 1, #slots, 22 do
    local _, _, expires = read('>c8I7I7', slots, at)
    fresh = expires > fresh and expires or fresh
  end
  return fresh
end
