-- Sets the limits that all nodes share, if their version is still the one that the caller saw.
--
-- KEYS     the policy: a version in digits, a newline, and the limits, which are empty once they were removed
-- ARGV     the nonce and the expected version, or '' for any; the limits, or '' to remove them
-- Returns  the nonce; then 1 and the new version, or 0 and the current one
--
-- The version is the Unix time in seconds, or one more than the last version if that is greater. So it never goes
-- back and is never reused, even if the key was lost in between, and it differs from the small version numbers that
-- a node counts for its own config.

local version = tonumber(string.match(call('GETRANGE', KEYS[1], 0, 16), '^(%d+)\n')) or 0
local nonce, expected = read('>I6', ARGV[1]), sub(ARGV[1], 7)
if expected ~= '' and tonumber(expected) ~= version then
  return { nonce, 0, version }
end
version = math.max(version + 1, tonumber(call('TIME')[1]))
call('SET', KEYS[1], format('%.0f\n', version) .. ARGV[2])
return { nonce, 1, version }
