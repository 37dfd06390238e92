-- Sets or removes the override of one key, for all nodes.
--
-- KEYS     the overrides, a hash: `v` the version, `n` how many there are, `o:<id>` each override, `c:<version>` the
--          id that this version changed, for the last 10,000 versions, and `s` the cursor of the sweep
-- ARGV     the nonce and the most overrides; the id; the override, or '' to remove it
-- Returns  the nonce; then 1 and the new version; or 0 and the current one if there was nothing to remove, or 2 if
--          there are too many
--
-- The first version is the Unix time in seconds times 100,000, so that versions of a hash that was lost are not
-- mistaken for those of the next one.
--
-- Nodes end an override by themselves, so the end changes no version. A new override sweeps some fields for ended ones,
-- from where the last sweep stopped: about 100, and about 10,000 if there is no room otherwise.

local nonce, most = read('>I6', ARGV[1]), tonumber(sub(ARGV[1], 7))
local known = call('HEXISTS', KEYS[1], 'o:' .. ARGV[2]) == 1
local version = tonumber(call('HGET', KEYS[1], 'v') or 0)
local count = tonumber(call('HGET', KEYS[1], 'n') or 0)
if not known and ARGV[3] == '' then
  return { nonce, 0, version }
end
local now = tonumber(call('TIME')[1])
if not known then
  local cursor, pages = call('HGET', KEYS[1], 's') or '0', 0
  repeat
    local page = call('HSCAN', KEYS[1], cursor, 'COUNT', 100)
    cursor, pages = page[1], pages + 1
    for field = 1, #page[2], 2 do
      local ends = sub(page[2][field], 1, 2) == 'o:' and string.match(page[2][field + 1], '^%S+ %S+ %S+ %S+ (%d+)')
      if ends and tonumber(ends) <= now then
        count = count - call('HDEL', KEYS[1], page[2][field])
      end
    end
  until count < most or pages == 100
  call('HSET', KEYS[1], 's', cursor, 'n', format('%.0f', count))
  if count >= most then
    return { nonce, 2, version }
  end
end
if version == 0 then
  version = now * 100000
end
version = version + 1
if ARGV[3] == '' then
  call('HDEL', KEYS[1], 'o:' .. ARGV[2])
  count = count - 1
else
  call('HSET', KEYS[1], 'o:' .. ARGV[2], ARGV[3])
  count = known and count or count + 1
end
call('HSET', KEYS[1], 'v', format('%.0f', version), 'n', format('%.0f', count), format('c:%.0f', version), ARGV[2])
call('HDEL', KEYS[1], format('c:%.0f', version - 10000))
return { nonce, 1, version }
