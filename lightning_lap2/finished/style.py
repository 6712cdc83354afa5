"""The page's style sheet: light and dark, wide and narrow, and on paper."""

from __future__ import annotations

STYLE = """
:root { --ink:#1d2733; --soft:#5b6877; --line:#dfe4ea; --paper:#fff; --back:#f4f6f8; --good:#0b7a53; --bad:#b3261e;
  --warn:#9a5b00; --curve:#0072b2; --level:#d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6ebf0; --soft:#9aa7b5; --line:#33404d; --paper:#1b232c;
  --back:#12181f; --good:#4cc38a; --bad:#ff8a80; --warn:#ffb74d; --curve:#56b4e9; --level:#ff9e5e; } }
* { box-sizing:border-box }
body { margin:0; background:var(--back); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "DejaVu Sans",sans-serif }
main { max-width:860px; margin:0 auto; padding:32px 16px 48px }
header, section { background:var(--paper); border:1px solid var(--line); border-radius:10px; padding:20px 28px 22px;
  margin-bottom:18px }
header { border-top:6px solid var(--good) }
header.infinite, header.invalid, header.reproducible { border-top-color:var(--bad) }
header.nothing, header.untrained { border-top-color:var(--warn) }
.kicker { margin:0; color:var(--soft); font-size:13px; letter-spacing:.08em; text-transform:uppercase }
h1 { margin:2px 0 8px; font-size:28px; line-height:1.2; color:var(--good) }
.infinite h1, .invalid h1, .reproducible h1 { color:var(--bad) }
.nothing h1, .untrained h1 { color:var(--warn) }
h2 { margin:0 0 10px; font-size:19px }
h3 { margin:14px 0 4px; font-size:15px; color:var(--soft) }
dl { display:flex; flex-wrap:wrap; gap:12px 40px; margin:18px 0 12px }
dt { color:var(--soft); font-size:13px }
dd { margin:0; font-size:25px; font-weight:600; font-variant-numeric:tabular-nums }
.bar { height:8px; border-radius:4px; background:var(--line); overflow:hidden }
.bar div { height:100%; background:var(--curve) }
.small { margin:6px 0 0; color:var(--soft); font-size:13.5px }
svg { display:block; width:100%; height:auto; font-size:13px }
.grid { stroke:var(--line) }
.axis { fill:var(--soft) }
.curve { fill:none; stroke:var(--curve); stroke-width:2.4; stroke-linejoin:round }
.end { fill:var(--curve) }
.level { stroke:var(--level); stroke-width:1.5; stroke-dasharray:7 5 }
.level-label { fill:var(--level) }
ol { margin:4px 0; padding-left:24px }
li { margin:6px 0 }
ol.own li { border-left:3px solid var(--level); padding-left:10px }
table { border-collapse:collapse; width:100%; font-size:15px }
th, td { text-align:left; padding:7px 8px 7px 0; border-top:1px solid var(--line); vertical-align:top }
th { font-weight:400; color:var(--soft); width:50% }
td { font-variant-numeric:tabular-nums; overflow-wrap:anywhere }
tr:first-child th, tr:first-child td { border-top:0 }
footer { color:var(--soft); font-size:13px; padding:0 4px }
@media (max-width:600px) { header, section { padding:16px } svg { font-size:18px } }
@media print { body { background:#fff } header, section { break-inside:avoid } }
"""
