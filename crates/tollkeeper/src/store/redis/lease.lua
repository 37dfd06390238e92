-- The part of check.lua that grants units in advance. Only scripts for batches with leases contain it: there,
-- `grant_or_decide` takes the place of `decide`.

-- Grants units of the key of the due at `pos`. Returns whether there were any, and where the next toll begins; nil if the
-- due is not a lease.
local function grant(pos)
  local key, number, shape, want, shift, raise
  key, number, shape, want, pos = read('>HHBI4', arg, pos)
  if shape < 64 then
    return nil
  end
  shift, raise, pos = read('>I7I7', arg, pos)
  local quota, shared = quotas[number], shape % 32 >= 16
  local state = shared and held and held[key]
  local x, y, z, units
  if state then
    x, y, z = state.x, state.y, state.z
  elseif states[key] then
    x, y, z = state_read(quota, states[key])
    even = even and #states[key] == 12
  else
    states[key] = none
  end
  local lease = quota.kind == 1 and meter_lease or quota.kind == 3 and fixed_window_lease or sliding_window_lease
  units, x, y, z = lease(quota, quota.now, want, raise, shift, x, y, z)
  if units > 0 and shared then
    held, state = held or {}, state or {}
    state.x, state.y, state.z, state.shift, state.quota = x, y, z, shift, quota
    held[key] = state
  elseif units > 0 then
    state_save(keys[key], quota, shift, x, y, z)
  end
  return units > 0, pos
end

-- Decides the toll at `pos`, or grants units if it is a lease.
local function grant_or_decide(pos)
  local granted, next = grant(pos)
  if granted == nil then
    return decide(pos, true)
  end
  return granted, next
end

