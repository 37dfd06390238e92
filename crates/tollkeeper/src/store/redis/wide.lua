-- States that are not read with MGET: logs, of which only a few stamps are needed, and slots.

-- A stamp of a log: first the stored ones, then those that this script has added. Stamps are fetched 128 at a time.
local function log_stamp(log, index)
  if index >= log.head then
    return (read('>I7', log.tail, (index - log.head) * 7 + 1))
  end
  if log.text then
    return (read('>I7', log.text, index * 7 + 1))
  end
  local chunk = floor(index / 128)
  if not log[chunk] then
    log[chunk] = call('GETRANGE', log.name, chunk * 896, chunk * 896 + 895)
  end
  return (read('>I7', log[chunk], (index - chunk * 128) * 7 + 1))
end

-- Opens a stored log. A value that cannot be a log is treated as missing, and will be overwritten.
local function log_open(name)
  local size = pcall('STRLEN', name)
  local text
  if type(size) ~= 'number' or size % 7 ~= 0 then
    size, text = 0, ''
  end
  return { name = name, len = size / 7, head = size / 7, text = text, tail = '', stamp = log_stamp }
end

-- The whole text of a log.
local function log_text(log)
  return (log.text or call('GETRANGE', log.name, 0, -1)) .. log.tail
end

-- Adds an admission to a log; with cost 0, only applies a correction after the clock stepped back.
local function log_enter(log, moved, first, stamp, now, cost)
  if sliding_log_rewrites(log, moved, first) then
    log.text = sliding_log_write(log_text(log), moved, first, stamp, now, cost)
    log.head, log.tail = #log.text / 7, ''
  else
    log.tail = log.tail .. sliding_log_entry(stamp, cost)
  end
  log.len = log.head + #log.tail / 7
end

-- Opens the slots of a key. A value that cannot be slots is treated as missing.
local function slots_open(name)
  local text = pcall('GET', name)
  if type(text) ~= 'string' or #text % 22 ~= 0 then
    text = ''
  end
  return { name = name, text = text }
end

-- Writes a changed log or slots, and deletes the key if they have become empty.
local function wide_save(name, state, quota)
  local text, fresh
  if quota.kind == 5 then
    fresh = state.len > 0 and state.stamp(state, state.len - 1) + quota.period
    text = state.text and state.text .. state.tail
  else
    text, fresh = state.text, concurrency_fresh_at(state.text)
  end
  if not text then
    call('APPEND', name, state.tail)
    call('PEXPIREAT', name, expiry(fresh))
  elseif text == '' then
    call('DEL', name)
  else
    put(name, text, fresh)
  end
end
