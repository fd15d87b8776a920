//! Prints what was measured beside what is asked for.

use crate::load::Load;

/// Lines of results.
pub struct Table {
    below: usize,
}

impl Table {
    /// An empty one.
    pub fn new() -> Self {
        Self { below: 0 }
    }

    /// Begins a part.
    pub fn title(&mut self, text: &str) {
        println!("\n{text}");
    }

    /// A line without a floor.
    pub fn note(&mut self, text: &str) {
        println!("  {text}");
    }

    /// A throughput.
    pub fn line(&mut self, name: &str, load: &Load) {
        println!("{}", row(name, load));
    }

    /// A throughput as a part of another, with its floor.
    pub fn ratio(&mut self, name: &str, load: &Load, best: &Load, floor: f64) {
        let ratio = load.rate / best.rate;
        let verdict = self.verdict(ratio >= floor && load.errors == 0);
        println!(
            "{}   {ratio:.2} of bare (floor {floor:.2}) {verdict}",
            row(name, load)
        );
    }

    /// A number that must not be above `most`.
    pub fn most(&mut self, name: &str, value: f64, most: f64) {
        let verdict = self.verdict(value <= most);
        println!("  {name:<52} {value:>8.2} (at most {most}) {verdict}");
    }

    /// A number without a floor.
    pub fn number(&mut self, name: &str, value: f64) {
        println!("  {name:<52} {value:>8.2}");
    }

    /// The last line.
    pub fn print_verdict(&self) {
        match self.below {
            0 => println!("\nevery measured floor is held"),
            below => println!("\n{below} lines are BELOW FLOOR"),
        }
    }

    fn verdict(&mut self, held: bool) -> &'static str {
        self.below += usize::from(!held);
        if held { "ok" } else { "BELOW FLOOR" }
    }
}

fn row(name: &str, load: &Load) -> String {
    let errors = match load.errors {
        0 => String::new(),
        errors => format!("  {errors} ERRORS"),
    };
    let cpu = match load.cpu.is_zero() {
        true => String::new(),
        false => format!("  cpu {:>7.1?} each", load.cpu),
    };
    format!(
        "  {name:<36} {:>8.0}/s  median {:>9.3?}  p99 {:>9.3?}{cpu}{errors}",
        load.rate, load.median, load.p99
    )
}
