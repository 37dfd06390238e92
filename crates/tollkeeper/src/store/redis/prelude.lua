-- The beginning of every script. Locals are faster than globals, and a script may not set globals.
local call, pcall = redis.call, redis.pcall
local read, pack = struct.unpack, struct.pack
local floor, ceil, type, unpack = math.floor, math.ceil, type, unpack
local sub, rep, format, concat = string.sub, string.rep, string.format, table.concat
