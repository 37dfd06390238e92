-- What all scripts begin with. A local is found faster than a global, and a script may set no global.
local call, pcall = redis.call, redis.pcall
local read, pack = struct.unpack, struct.pack
local floor, ceil, type, unpack = math.floor, math.ceil, type, unpack
local sub, rep, format, concat = string.sub, string.rep, string.format, table.concat
