"""The style sheet of the page; colours follow the reader's light or dark setting."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--page:#f6f8fa;--card:#ffffff;--line:#d0d7de;--ink:#1f2328;--soft:#59636e;--good:#1a7f37;
--bad:#d1242f;--warn:#9a6700;--track:#eaeef2}
@media (prefers-color-scheme:dark){:root{--page:#010409;--card:#0d1117;--line:#30363d;--ink:#f0f6fc;--soft:#9198a1;
--good:#3fb950;--bad:#ff7b72;--warn:#d29922;--track:#21262d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 ui-sans-serif,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}
main{max-width:1016px;margin:0 auto;padding:28px}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:34px 0 10px}h3{font-size:14px;margin:18px 0 6px}
p{margin:4px 0;color:var(--soft)}
.verdict{display:inline-block;margin-left:12px;padding:2px 12px;border-radius:99px;font-size:14px;font-weight:600;
vertical-align:4px;color:#fff}
.verdict.fits{background:#1a7f37}.verdict.tight{background:#d1242f}.verdict.unknown{background:#59636e}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:20px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:22px;line-height:1.3}.tile span{color:var(--soft);font-size:13px}
.plan svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:12px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--line);vertical-align:middle}
thead th{border-top:0;color:var(--soft);font-weight:600}td.number,th.number{text-align:right;white-space:nowrap}
td.short{color:var(--bad)}td:first-child{white-space:nowrap}
code,pre{font:13px/1.5 ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace}
pre{margin:6px 0;white-space:pre-wrap;overflow-wrap:anywhere}
.problem{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--bad);border-radius:12px;
padding:10px 16px;margin:10px 0}.problem.warning{border-left-color:var(--warn)}
.problem b code{color:var(--soft);font-weight:400;margin-left:8px}
.bar{display:block;width:100%;min-width:240px;height:14px}.bar .track{fill:var(--track)}
.bar .end{stroke:var(--bad);stroke-width:2}
.dot{display:inline-block;width:12px;height:12px;margin-right:7px;vertical-align:-1px}
"""
