-- Local names for what scripts use: locals are faster than globals. A script gets only those that it mentions.
local call = redis.call
local pcall = redis.pcall
local read = struct.unpack
local pack = struct.pack
local floor = math.floor
local type = type
local unpack = unpack
local sub = string.sub
local rep = string.rep
local format = string.format
local concat = table.concat
