-- Runs histories of one key with explicit times, and returns the result of every step and the final states. fold.rs
-- encodes the steps and decodes the results.

local arg = ARGV[1]
local last, pos = read('>H', arg)
local quotas = {}
for number = 1, last do
  quotas[number], pos = quota_read(arg, pos, 0)
end
local state, rows, finals = nil, {}, {}

local function say(row)
  rows[#rows + 1] = row
end

local function bit(yes)
  return yes and 1 or 0
end

-- The bytes of a packed state; only the length of a log or of slots.
local function say_state(quota)
  local bytes = state or ''
  say(quota.kind <= 4 and pack('>Bc0', #bytes, bytes) or pack('>I4', #bytes))
end

local function check(quota, now, cost, shift, hold, taker, writes)
  if quota.kind <= 4 then
    local tick, x, y, z = floor(now / quota.tick), nil, nil, nil
    if state then
      x, y, z = state_read(quota, state)
    end
    local allowed, after, moved
    if quota.kind <= 2 then
      allowed, after, moved, x, y = meter_step(quota.count, quota.burst, quota.period, tick, cost, x, y)
    else
      allowed, after, moved, x, y, z = quota.step(quota, tick, cost, shift, x, y, z)
    end
    if hold > 0 and meter_departs(quota, tick, x) * quota.tick - now >= hold then
      allowed = false
    end
    if writes and (allowed or moved) then
      state = state_bytes(quota, allowed and after or x, y, z)
    end
    say(pack('>BB', bit(allowed), bit(moved)))
  elseif quota.kind == 5 then
    local text = state or ''
    local log = sliding_log_of(text)
    local allowed, moved, first, used, stamp = sliding_log_step(quota, now, cost, log)
    local charged = writes and allowed
    local passes, next, fresh = sliding_log_report(quota, now, cost, charged, log, allowed, moved, first, used, stamp)
    say(pack('>BBI7I7I7I7I7', bit(allowed), bit(moved), used, stamp, passes, next, fresh))
    if charged or writes and moved then
      state = sliding_log_write(text, moved, first, stamp, now, charged and cost or 0)
    end
  else
    local allowed, moved, held, first = concurrency_step(quota, now, state or '')
    say(pack('>BBI7I7', bit(allowed), bit(moved), held, first))
    if writes and (allowed or moved) then
      state = concurrency_write(quota, now, state or '', allowed and taker or nil)
    end
  end
end

local function correct(quota, now, op, amount, shift, past)
  if quota.kind == 5 then
    if op == 4 then
      state = sliding_log_add(quota, now, amount, state or '')
    elseif state then
      state = sliding_log_give_back(quota, now, amount, past, state)
    end
    return
  end
  local meter, fixed = quota.kind <= 2, quota.kind == 3
  local tick, x, y, z = floor(now / quota.tick), nil, nil, nil
  if state then
    x, y, z = state_read(quota, state)
  end
  if op == 4 then
    local add = meter and meter_add or fixed and fixed_window_add or sliding_window_add
    state = state_bytes(quota, add(quota, tick, shift, amount, x, y, z))
  elseif state and quota.kind ~= 2 then
    local give_back = meter and meter_give_back or fixed and fixed_window_give_back or sliding_window_give_back
    state = state_bytes(quota, give_back(quota, tick, shift, amount, past, x, y, z))
  end
end

while pos <= #arg do
  local op, now, number, amount, shift, hold, who
  local past = {}
  op, now, number, amount, shift, hold, past.cost, past.count, past.mark, who, pos =
    read('>BI7HI7I7I7I7I7I7c8', arg, pos)
  local quota = quotas[number]
  if op <= 2 then
    check(quota, now, amount, shift, hold, who, op == 1)
  elseif op <= 4 then
    correct(quota, now, op, amount, shift, past)
  elseif op <= 6 then
    local held
    state, held = (op == 5 and concurrency_release or concurrency_renew)(now, state or '', who)
    say(pack('>B', bit(held)))
  elseif op == 7 then
    state = nil
  elseif op == 9 then
    local x, y, z, grant
    if state then
      x, y, z = state_read(quota, state)
    end
    local lease = quota.kind == 1 and meter_lease or quota.kind == 3 and fixed_window_lease or sliding_window_lease
    grant, x, y, z = lease(quota, floor(now / quota.tick), amount, past.cost, shift, x, y, z)
    if grant > 0 then
      state = state_bytes(quota, x, y, z)
    end
    say(pack('>I7', grant))
  else
    -- Start of the next history, with this state.
    finals[#finals + 1] = state or ''
    state = amount > 0 and sub(arg, pos, pos + amount - 1) or nil
    pos = pos + amount
  end
  if op ~= 8 then
    say_state(quota)
    if op ~= 7 and quota.kind <= 4 and state then
      -- The time from which the state equals a fresh one.
      say(pack('>I7', quota.fresh_at(quota, shift, state_read(quota, state)) * quota.tick))
    end
  end
end
finals[#finals + 1] = state or ''
return { concat(rows), finals }
