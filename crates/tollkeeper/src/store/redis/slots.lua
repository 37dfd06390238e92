-- Releases or renews a slot in every limit that it is held in.
--
-- KEYS     the slots of each limit
-- ARGV     the nonce, and 1 to renew it or 0 to release it; the ID of its holder, in 8 bytes
-- Returns  4 times the nonce, plus 1 if any limit still held it

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local nonce, renew = read('>I6B', ARGV[1])
local change = renew == 1 and concurrency_renew or concurrency_release
local found = 0
for item = 1, #KEYS do
  local slots = slots_open(KEYS[item])
  local text, held = change(now, slots.text, ARGV[2])
  if held then
    found = 1
  end
  if text ~= slots.text then
    slots.text = text
    wide_save(KEYS[item], slots, { kind = 6 })
  end
end
return nonce * 4 + found
