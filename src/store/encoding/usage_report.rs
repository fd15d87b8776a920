//! Sums of usage by groups. A long period is read by days in UTC; what begins or ends within a day is corrected by its
//! quarter hours, which are added or subtracted.

use std::collections::HashMap;

use jiff::civil::Date;

use crate::domain::calendar::{self, QUARTERS_PER_DAY, quarter_from, quarter_of, quarter_start};
use crate::domain::usage_sums::{DamagedSums, UsageSums};
use crate::store::StoreError;
use crate::store::encoding::run_values;
use crate::store::usage::{UsageDimension, UsageQuery, UsageReport, UsageRow};

/// Shorter periods are read by quarter hours only.
const MIN_QUARTERS_BY_DAY: i64 = 80;
/// A series that the query leaves out.
const NO_GROUP: u32 = u32::MAX;

type Values = Vec<Option<String>>;

/// The quarter hours that are read, of those from `first` to `last`; `None` if nothing is kept of that time.
pub fn period(query: &UsageQuery, first: i64, last: i64) -> Option<(i64, i64)> {
    let start = query
        .since
        .map_or(first, |since| quarter_of(since).max(first));
    let end = query
        .until
        .map_or(last + 1, |until| quarter_from(until).min(last + 1));
    (start < end).then_some((start, end))
}

/// The parts of a period that have rows of their own: its days, or all of it.
pub fn segments(query: &UsageQuery, (start, end): (i64, i64)) -> Vec<Segment> {
    let whole = Segment {
        day: None,
        start,
        end,
    };
    if !query.by.contains(&UsageDimension::Day) {
        return vec![whole];
    }
    let days = calendar::days(&query.time_zone, start, end);
    let segment = |day: &calendar::Day| Segment {
        day: Some(day.date),
        start: day.start,
        end: day.end,
    };
    days.iter().map(segment).collect()
}

/// From quarter hour `start` to before `end`.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub day: Option<Date>,
    pub start: i64,
    pub end: i64,
}

/// Stored sums that are added to those of a segment, or subtracted.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// By days, not by quarter hours.
    pub is_day: bool,
    pub start: i64,
    pub end: i64,
    pub is_subtracted: bool,
}

impl Segment {
    pub fn parts(&self) -> Vec<Part> {
        let (start, end) = (self.start, self.end);
        let part = |is_day, start, end, is_subtracted| Part {
            is_day,
            start,
            end,
            is_subtracted,
        };
        let mut parts = vec![part(false, start, end, false)];
        if end - start >= MIN_QUARTERS_BY_DAY {
            let (first_day, last_day) = (nearest_day(start), nearest_day(end));
            let (first, last) = (first_day * QUARTERS_PER_DAY, last_day * QUARTERS_PER_DAY);
            parts = vec![
                part(true, first_day, last_day, false),
                part(false, start, first, false),
                part(false, last, end, false),
                part(false, first, start, true),
                part(false, end, last, true),
            ];
        }
        parts.retain(|part| part.start < part.end);
        parts
    }
}

/// The day in UTC whose beginning is nearest.
fn nearest_day(quarter: i64) -> i64 {
    (quarter + QUARTERS_PER_DAY / 2).div_euclid(QUARTERS_PER_DAY)
}

/// A row of `usage_series`. Empty texts stand for absent values.
pub struct SeriesRow<'r> {
    pub id: i64,
    pub owner: &'r str,
    pub session: &'r str,
    pub labels: &'r str,
    pub agent: &'r str,
    pub model: &'r str,
}

/// The groups of a query.
#[derive(Default)]
pub struct Groups {
    values: Vec<Values>,
    known: HashMap<Values, u32>,
    /// The group of each series, by its id.
    of_series: Vec<u32>,
}

impl Groups {
    /// Adds a series, unless the query leaves it out.
    pub fn add(&mut self, query: &UsageQuery, row: &SeriesRow<'_>) {
        let Some(values) = series_values(row, query) else {
            return;
        };
        let group = match self.known.get(&values) {
            Some(group) => *group,
            None => {
                let group = u32::try_from(self.values.len()).unwrap_or(NO_GROUP);
                self.values.push(values.clone());
                self.known.insert(values, group);
                group
            }
        };
        let index = usize::try_from(row.id).unwrap_or(0);
        if self.of_series.len() <= index {
            self.of_series.resize(index + 1, NO_GROUP);
        }
        self.of_series[index] = group;
    }

    /// Adds or subtracts the stored sums of a series; `None` if the column has another type.
    pub fn apply(
        &self,
        sums: &mut GroupSums,
        part: &Part,
        series: i64,
        stored: Option<&[u8]>,
    ) -> Result<(), StoreError> {
        let group = usize::try_from(series)
            .ok()
            .and_then(|id| self.of_series.get(id));
        let Some(group) = group.filter(|group| **group != NO_GROUP) else {
            return Ok(());
        };
        let apply = match part.is_subtracted {
            true => UsageSums::subtract_encoded,
            false => UsageSums::add_encoded,
        };
        stored
            .ok_or(DamagedSums)
            .and_then(|stored| apply(sums.of(*group), stored))
            .map_err(|_| StoreError::Corrupt("a sum of usage".to_owned()))
    }
}

/// The sums of the groups that have any.
#[derive(Clone)]
pub struct GroupSums {
    /// By group, its position in `found`.
    positions: Vec<u32>,
    found: Vec<(u32, UsageSums)>,
}

impl GroupSums {
    pub fn new(groups: &Groups) -> Self {
        Self {
            positions: vec![NO_GROUP; groups.values.len()],
            found: Vec::new(),
        }
    }

    fn of(&mut self, group: u32) -> &mut UsageSums {
        let position = &mut self.positions[group as usize];
        if *position == NO_GROUP {
            *position = self.found.len() as u32;
            self.found.push((group, UsageSums::default()));
        }
        &mut self.found[*position as usize].1
    }
}

/// Collects the rows of a report.
pub struct ReportBuilder {
    report: UsageReport,
    rows: Vec<UsageRow>,
}

impl ReportBuilder {
    pub fn new((start, end): (i64, i64)) -> Self {
        Self {
            report: UsageReport {
                since: Some(quarter_start(start)),
                until: Some(quarter_start(end)),
                ..UsageReport::default()
            },
            rows: Vec::new(),
        }
    }

    /// Adds the sums of a segment, without empty ones. Returns false if there are too many rows.
    pub fn add(
        &mut self,
        query: &UsageQuery,
        groups: &Groups,
        segment: &Segment,
        sums: GroupSums,
    ) -> bool {
        for (group, sums) in sums.found.into_iter().filter(|(_, sums)| !sums.is_empty()) {
            self.report.totals.add(&sums);
            self.rows.push(UsageRow {
                values: groups.values[group as usize].clone(),
                day: segment.day,
                sums,
            });
        }
        self.rows.len() <= query.max_rows
    }

    pub fn finish(mut self, query: &UsageQuery) -> UsageReport {
        if self.rows.len() <= query.max_rows {
            sort(&mut self.rows, &query.by);
            self.report.rows = Some(self.rows);
        }
        self.report
    }
}

/// The report of a time of which nothing is kept.
pub fn empty_report() -> UsageReport {
    UsageReport {
        rows: Some(Vec::new()),
        ..UsageReport::default()
    }
}

/// The values of a series in the order of the query's dimensions; `None` if the query leaves it out.
fn series_values(row: &SeriesRow<'_>, query: &UsageQuery) -> Option<Values> {
    if let Some(visible) = &query.visible_agents
        && !visible.is_match(row.agent)
    {
        return None;
    }
    let is_label = |by: &UsageDimension| matches!(by, UsageDimension::Label(_));
    let labels = match query.labels.is_empty() && !query.by.iter().any(is_label) {
        true => run_values::labels(None),
        false => run_values::labels(Some(row.labels)),
    };
    let has_label = |(name, value): &(String, String)| labels.get(name) == Some(value);
    if !query.labels.iter().all(has_label) {
        return None;
    }
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let mut values = Vec::with_capacity(query.by.len());
    for dimension in &query.by {
        values.push(match dimension {
            UsageDimension::Agent => text(row.agent),
            UsageDimension::Model => text(row.model),
            UsageDimension::Session => text(row.session),
            UsageDimension::Key => text(row.owner),
            UsageDimension::Label(name) => labels.get(name).cloned(),
            UsageDimension::Day => continue,
        });
    }
    Some(values)
}

/// Sorts by the values in the order of the dimensions, absent ones last.
fn sort(rows: &mut [UsageRow], by: &[UsageDimension]) {
    let day_position = by.iter().position(|it| *it == UsageDimension::Day);
    let before_day = day_position.unwrap_or(by.len());
    rows.sort_by_cached_key(|row| {
        let (first, last) = row.values.split_at(before_day.min(row.values.len()));
        let sortable = |values: &[Option<String>]| {
            let values = values.iter().map(|it| (it.is_none(), it.clone()));
            values.collect::<Vec<_>>()
        };
        (sortable(first), row.day, sortable(last))
    });
}
