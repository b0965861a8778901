-- In front of the verbs that change live terms (see terms.lua).

-- The text with one term in place of another of its name (`line`; nothing: that one ends), and without those that are
-- over; and when the last of them ends (us; 0: none is left).
local function changed(text, name, till, rest)
  local lines, last = {}, 0
  local function keep(field, ends, behind)
    lines[#lines + 1] = field .. ' ' .. int(ends) .. ' ' .. behind
    last = math.max(last, ends)
  end
  for line in string.gmatch(text or '', '[^\n]+') do
    local field, ends, behind = string.match(line, '^(%l+) (%d+) (.*)$')
    if field and field ~= name and #ends < 18 and now < tonumber(ends) then keep(field, tonumber(ends), behind) end
  end
  if till then keep(name, till, rest) end
  return table.concat(lines, '\n'), last
end

-- When the pause that the text knows of ends, or has ended (us); 0 = there is none.
local function paused_till(text)
  local last = 0
  for till in string.gmatch('\n' .. (text or ''), '\npause (%d+) ') do
    if #till < 18 then last = math.max(last, tonumber(till)) end
  end
  return last
end
