-- Refunds a charge or adds to it, at most once for each charge.
--
-- KEYS     for each item of the charge its state and its marker, which exists once the charge was corrected
-- ARGV[1]  the nonce, when the charge becomes void, then for each item a quota, its windows' shift, the facts of the
--          charge (cost, count, mark), and the change: 0 none, 1 refund, 2 add
-- Returns  4 times the nonce, plus 0 if the charge is void, 1 if it was corrected before, 2 if it was corrected now

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local arg = ARGV[1]
local nonce, void, pos = read('>I6I7', arg)
if void <= now then
  return nonce * 4
end
for item = 2, #KEYS, 2 do
  if call('EXISTS', KEYS[item]) == 1 then
    return nonce * 4 + 1
  end
end

-- A marker outlives its charge by up to a minute, so that a clock that is set back does not allow a second refund.
local marked = expiry(void + (void - now < 60000000 and void - now or 60000000))

local function packed_correct(name, quota, change, amount, shift, past)
  local meter, fixed = quota.kind <= 2, quota.kind == 3
  local bytes, x, y, z = pcall('GET', name), nil, nil, nil
  if type(bytes) == 'string' then
    x, y, z = state_read(quota, bytes)
  end
  if change == 2 then
    local add = meter and meter_add or fixed and fixed_window_add or sliding_window_add
    x, y, z = add(quota, quota.now, shift, amount, x, y, z)
  elseif x and quota.kind ~= 2 then
    local give_back = meter and meter_give_back or fixed and fixed_window_give_back or sliding_window_give_back
    x, y, z = give_back(quota, quota.now, shift, amount, past, x, y, z)
  else
    -- No state is left to refund, or it is a leaky bucket, where the charge has already delayed later requests.
    return
  end
  state_save(name, quota, shift, x, y, z)
end

local function log_correct(name, quota, change, amount, past)
  local log = log_open(name)
  local text = log_text(log)
  if change == 2 then
    text = sliding_log_add(quota, now, amount, text)
  elseif text ~= '' then
    text = sliding_log_give_back(quota, now, amount, past, text)
  else
    return
  end
  log.text, log.head, log.len = text, #text / 7, #text / 7
  wide_save(name, log, quota)
end

for item = 1, #KEYS, 2 do
  local quota, shift, change, amount
  local past = {}
  quota, pos = quota_read(arg, pos, now)
  shift, past.cost, past.count, past.mark, change, amount, pos = read('>I7I7I7I7BI7', arg, pos)
  call('SET', KEYS[item + 1], '', 'PXAT', marked)
  if change > 0 and quota.kind <= 4 then
    packed_correct(KEYS[item], quota, change, amount, shift, past)
  elseif change > 0 and quota.kind == 5 then
    log_correct(KEYS[item], quota, change, amount, past)
  end
end
return nonce * 4 + 2
