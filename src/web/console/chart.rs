//! Stacked bars by day, as SVG.

use jiff::civil::Date;
use maud::{Markup, html};

/// The size in the chart's own units.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 24.0;
const TOP: f64 = 10.0;

pub struct Chart {
    pub title: String,
    pub days: Vec<Date>,
    /// At most as many as the style sheet has colors; each with one value a day.
    pub series: Vec<Series>,
    /// How a value is shown.
    pub format: fn(f64) -> String,
}

pub struct Series {
    pub name: String,
    pub values: Vec<f64>,
}

impl Series {
    pub fn sum(&self) -> f64 {
        self.values.iter().sum()
    }
}

impl Chart {
    pub fn render(&self) -> Markup {
        let day_sum = |day: usize| {
            self.series
                .iter()
                .map(|series| series.values[day])
                .sum::<f64>()
        };
        let highest = (0..self.days.len()).map(day_sum).fold(0.0, f64::max);
        let top = round_up(highest);
        html! {
            figure.chart {
                figcaption { (self.title) }
                div.scroll role="region" aria-label=(self.title) tabindex="0" {
                    svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(self.summary()) {
                        (self.grid(top))
                        @for day in 0..self.days.len() { (self.bar(day, top)) }
                        (self.dates())
                    }
                }
                ul.key {
                    @for (index, series) in self.series.iter().enumerate() {
                        li { span class=(format!("swatch s{index}")) {} (series.name) " " b { ((self.format)(series.sum())) } }
                    }
                }
            }
        }
    }

    /// For people who do not see the bars.
    fn summary(&self) -> String {
        let mut text = self.title.clone();
        for series in &self.series {
            text.push_str(&format!(
                ", {}: {}",
                series.name,
                (self.format)(series.sum())
            ));
        }
        text
    }

    fn grid(&self, top: f64) -> Markup {
        html! {
            @for part in 0..=2 {
                @let share = f64::from(part) / 2.0;
                @let y = height_of(1.0 - share) + TOP;
                line class="grid" x1=(LEFT) x2=(WIDTH) y1=(y) y2=(y) {}
                text class="tick end" x=(LEFT - 8.0) y=(y + 4.0) { ((self.format)(top * share)) }
            }
        }
    }

    fn slot(&self) -> f64 {
        (WIDTH - LEFT) / self.days.len().max(1) as f64
    }

    fn bar(&self, day: usize, top: f64) -> Markup {
        let slot = self.slot();
        let width = (slot * 0.7).min(36.0);
        let x = LEFT + slot * day as f64 + (slot - width) / 2.0;
        let mut bottom = height_of(1.0) + TOP;
        let mut parts = Vec::new();
        for (index, series) in self.series.iter().enumerate() {
            let value = series.values[day];
            if value > 0.0 {
                let height = height_of(value / top).max(1.0);
                bottom -= height;
                parts.push((index, series, value, bottom, height));
            }
        }
        html! {
            @for (index, series, value, y, height) in parts {
                rect class=(format!("s{index}")) x=(format!("{x:.1}")) y=(format!("{y:.1}")) width=(format!("{width:.1}")) height=(format!("{height:.1}")) {
                    title { (self.days[day]) ", " (series.name) ": " ((self.format)(value)) }
                }
            }
        }
    }

    fn dates(&self) -> Markup {
        let every = self.days.len().div_ceil(10).max(1);
        let slot = self.slot();
        html! {
            @for (index, day) in self.days.iter().enumerate().step_by(every) {
                @let x = LEFT + slot * (index as f64 + 0.5);
                text class="tick middle" x=(format!("{x:.1}")) y=(HEIGHT - 6.0) { (day.strftime("%b %-d").to_string()) }
            }
        }
    }
}

fn height_of(share: f64) -> f64 {
    share * (HEIGHT - BOTTOM - TOP)
}

/// The next of 1, 2, 5, 10, 20, …
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let unit = 10_f64.powf(value.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|factor| factor * unit >= value);
    factor.unwrap_or(10.0) * unit
}

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn the_top_of_the_axis_is_a_round_number() {
        let tops = [0.0, 0.03, 1.0, 1.1, 49.0, 51.0].map(round_up);
        for (top, expected) in tops.into_iter().zip([1.0, 0.05, 1.0, 2.0, 50.0, 100.0]) {
            assert!((top - expected).abs() < 1e-9, "{top} instead of {expected}");
        }
    }
}
