-- The requests that wrk sends: one for each key, built before the run, so that wrk is not the bottleneck.
--
--     wrk … -s load.lua URL -- KEYS METHOD PATH BODY      KEY in the path or the body is replaced by the key

local requests, last = {}, 0

function init(args)
    local keys, method, path, body = tonumber(args[1]), args[2], args[3], args[4]
    local headers = {}
    if body == "" then body = nil else headers["Content-Type"] = "application/json" end
    for number = 1, keys do
        local function filled(text) return text and (text:gsub("KEY", "user-" .. number)) end
        requests[number] = wrk.format(method, filled(path), headers, filled(body))
    end
end

function request()
    last = last % #requests + 1
    return requests[last]
end

function done(summary)
    local broken = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
    print(("counted %d %d %d %d"):format(summary.requests, summary.duration, summary.errors.status, broken))
end
