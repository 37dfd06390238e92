-- Sets the limits that all nodes share, if they are still those that the caller saw.
--
-- KEYS     the policy: a version in digits, a newline, and the limits; nothing behind it once they were taken back
-- ARGV     the nonce, and the version that must be there or '' for any; the limits, or '' to take them back
-- Returns  the nonce; then 1 and the new version, or 0 and the one that is there
--
-- The version is the second it was made in, or one more than the last: it neither goes back nor comes again,
-- even if the key was lost in between, and is not mistaken for a count of some node's own.

local version = tonumber(string.match(call('GETRANGE', KEYS[1], 0, 16), '^(%d+)\n')) or 0
local nonce, expected = read('>I6', ARGV[1]), sub(ARGV[1], 7)
if expected ~= '' and tonumber(expected) ~= version then
  return { nonce, 0, version }
end
version = math.max(version + 1, tonumber(call('TIME')[1]))
call('SET', KEYS[1], format('%.0f\n', version) .. ARGV[2])
return { nonce, 1, version }
