//! The tables of both engines, and the types of their columns.

/// What a column holds, and how each engine stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 16 bytes, or a `uuid`.
    Id,
    Int,
    /// 0 or 1, or a `boolean`.
    Flag,
    Text,
    /// A text that may contain U+0000, or its bytes.
    FreeText,
    Bytes,
    /// A JSON array, or a `text[]` with the JSON of each element.
    List,
}

pub struct Table {
    pub name: &'static str,
    /// The columns that both engines have.
    pub columns: &'static [(&'static str, Kind)],
    /// Columns of PostgreSQL alone.
    pub more: &'static [(&'static str, Kind)],
}

macro_rules! tables {
    ($($name:ident { $($kind:ident: $($column:ident)+;)+ } $(+ { $($more:ident: $more_kind:ident)+ })?)+) => {
        /// Tables whose rows are copied as they are. `clock` has one row in any case; `trees`, `nodes`, `texts` and `checks`
        /// are made or left out. Open `requests` refuse a copy, others are done.
        pub const TABLES: &[Table] = &[$(Table {
            name: stringify!($name),
            columns: &[$($((stringify!($column), Kind::$kind),)+)+],
            more: &[$($((stringify!($more), Kind::$more_kind),)+)?],
        },)+];
    };
}

tables! {
    definitions { Bytes: hash; FreeText: body; Int: used_until; Id: only_run; }
    runs {
        Id: id root parent;
        Text: owner status agent agent_version completion_status labels webhook waiting_for warnings model_usage fork variant;
        Flag: child stream structured held;
        Int: depth created_at started_at finished_at last_event attempt turns input_tokens output_tokens
            cache_read_tokens cache_write_tokens model_calls tool_calls cost unreported tree_runs tree_input_tokens
            tree_output_tokens tree_cache_read_tokens tree_cache_write_tokens tree_model_calls tree_tool_calls tree_cost
            tree_unreported deadline_at deadline_seconds timeout waiting_since waited workdir_device workdir_inode
            messages;
        FreeText: model stop_reason tool_call_id label error cancel_reason input task partial_content content session;
        Bytes: definition;
    } + { input_is_parts: Flag }
    labels { FreeText: key value; Id: run; }
    claims { Text: credential route; FreeText: key; Id: run; Bytes: body; Int: expires message; }
    entries { Id: root run; Int: last_seq count; FreeText: entries texts; Bytes: turns; }
    deletions { Id: root; }
    attachments { Bytes: hash data; }
    attachment_uses { Id: run; Bytes: hash; }
    inputs { Id: run root received; Int: seq; Text: owner kind request; FreeText: call wake; }
    world_events { Id: id; Int: at woken; Text: owner; FreeText: wake client_id data; }
    event_receipts { Id: event run; }
    deliveries {
        Id: id run; Text: event host secret_env status owner; FreeText: url body push;
        Int: created_at since tries next_at; List: attempts;
    }
    push_configs { Id: run; FreeText: id url context token scheme credentials; }
    usage_series { Int: id last_day; Text: owner labels agent; FreeText: session model; } + { digest: Bytes }
    usage_values { Text: owner; FreeText: name value; Int: last_day; }
    usage_quarters { Int: start series; Bytes: sums; } + { writer: Id }
    usage_days { Int: start series; Bytes: sums; } + { writer: Id }
    budget_usage { Text: budget; Int: quarter tokens cost; } + { writer: Id }
    budget_alerts { Text: budget; Int: period share; }
    schedules { Text: agent name times; Int: handled_at held_at last_at; Flag: is_paused; Id: last_run last_eval; FreeText: error; }
    rollouts {
        Text: agent candidate promoted_from promoted_version; Int: started_at percent file_percent stopped_at promoted_at fixed_at;
        FreeText: baseline loss promoted_text;
    }
    batches {
        Id: id; Text: agent owner key_owner; Int: lines created_at finished_at key_expires;
        FreeText: cancel_reason key; Bytes: body_hash;
    }
    scores { Id: run series; Text: name author label; Int: value turn at revision day; FreeText: comment; }
    scorings { Id: run; Text: scorer; }
    score_series { Id: id; Text: owner agent version variant labels name; }
    score_sums {
        Int: day n sum_2 sum_1 sum_0 square_4 square_3 square_2 square_1 square_0; Id: series; Text: label;
    }
    link_secret { Int: id; Bytes: secret; }
    batch_lines { Id: batch run; Int: line; FreeText: body problem; }
    evals {
        Id: id; Text: owner agent state; Int: planned ended spent created_at finished_at;
        FreeText: request definitions reason result;
    }
    eval_cases { Id: eval source; Int: number; FreeText: id request expected; }
    eval_runs { Id: eval run; Int: number repetition version; FreeText: ending; }
}

impl Table {
    /// The names of the columns that both engines have.
    pub fn names(&self) -> Vec<&'static str> {
        self.columns.iter().map(|(name, _)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::store::migrate::tables::TABLES;
    use crate::store::sqlite::offline;

    /// A column that a migration adds must be copied too.
    #[test]
    fn all_columns_are_copied() {
        let dir = tempfile::tempdir().expect("a directory");
        let opened = offline::create(dir.path()).expect("a database");
        let db = &opened.connection;
        let mut tables = db
            .prepare("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            .expect("tables");
        let tables: BTreeSet<String> = tables
            .query_map([], |row| row.get("name"))
            .and_then(Iterator::collect)
            .expect("names");
        for table in tables {
            if ["clock", "checks", "texts"].contains(&&*table) {
                continue;
            }
            let known = TABLES.iter().find(|known| known.name == table);
            let known = known.unwrap_or_else(|| panic!("{table} is not copied"));
            let names: BTreeSet<&str> = known.names().into_iter().collect();
            let mut columns = db
                .prepare(&format!("SELECT name FROM pragma_table_info('{table}')"))
                .expect("columns");
            let columns: BTreeSet<String> = columns
                .query_map([], |row| row.get("name"))
                .and_then(Iterator::collect)
                .expect("names");
            // Numbers of rows that nothing refers to.
            let is_number = |name: &&String| *name == "id" && !names.contains("id");
            let columns: BTreeSet<&str> = columns
                .iter()
                .filter(|name| !is_number(name))
                .map(String::as_str)
                .collect();
            assert_eq!(names, columns, "{table}");
        }
    }
}
