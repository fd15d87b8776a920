//! Reads `[clients]`.

use crate::config::clients::Clients;
use crate::settings::table_reader::TableReader;

pub fn read(s: &mut TableReader<'_>) -> Clients {
    let default = Clients::default();
    Clients {
        console: s.flag("console").unwrap_or(default.console),
        openai: s.flag("openai").unwrap_or(default.openai),
        mcp: s.flag("mcp").unwrap_or(default.mcp),
        a2a: s.flag("a2a").unwrap_or(default.a2a),
        ag_ui: s.flag("ag_ui").unwrap_or(default.ag_ui),
        tool_wait: s.seconds("tool_wait", 1).unwrap_or(default.tool_wait),
    }
}
