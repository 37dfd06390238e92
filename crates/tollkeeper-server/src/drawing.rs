//! A minimal SVG writer: a few shapes on an opaque background, so that a picture is legible on dark and
//! on light pages. The colours are the palette of Okabe and Ito, which is safe for colour-blind readers;
//! the marks differ in shape as well.

use std::fmt::Write;

/// The colours, each with its meaning.
pub mod colour {
    /// Admitted requests.
    pub const ADMITTED: &str = "#0072b2";
    /// Refused requests.
    pub const REFUSED: &str = "#d55e00";
    /// Requests that leave a queue.
    pub const DEPARTED: &str = "#009e73";
    /// What is left of a quota.
    pub const REMAINING: &str = "#d7e7f3";
    /// Axes and dashed lines.
    pub const AXIS: &str = "#555555";
    /// Lines of a grid.
    pub const GRID: &str = "#e4e4e4";
}

const STYLE: &str = "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1a1a1a}\
                     .title{font-size:17px;font-weight:bold}.name{font-size:14px}.label{font-size:12.5px}";

/// A linear scale: the number and the pixel at each end.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// The number and the pixel at its start.
    pub from: (f64, f64),
    /// The number and the pixel at its end.
    pub to: (f64, f64),
}

impl Axis {
    /// The pixel of a number.
    pub fn pixel(&self, number: f64) -> f64 {
        let (from, to) = (self.from, self.to);
        from.1 + (number - from.0) / (to.0 - from.0) * (to.1 - from.1)
    }
}

/// Which part of a text is at its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Its start.
    Start,
    /// Its middle.
    Middle,
    /// Its end.
    End,
}

/// A picture that is being drawn.
#[derive(Clone, Debug)]
pub struct Drawing(String);

/// A point in pixels, from the upper left corner.
pub type Point = (f64, f64);

impl Drawing {
    /// A picture on a white background.
    pub fn new(width: f64, height: f64, title: &str) -> Drawing {
        let mut drawing = Drawing(String::new());
        drawing.add(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
        ));
        drawing
    }

    /// A picture without a background, for a page whose style has its colours.
    pub fn inline(width: f64, height: f64, title: &str) -> Drawing {
        let mut drawing = Drawing(String::new());
        let title = escaped(title);
        drawing
            .add(format_args!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">"));
        drawing
    }

    /// The SVG.
    pub fn done(mut self) -> String {
        self.add(format_args!("</svg>"));
        self.0
    }

    /// A text at a point.
    pub fn text(&mut self, (x, y): Point, anchor: Anchor, class: &str, words: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let words = escaped(words);
        self.add(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{words}</text>"
        ));
    }

    /// Text that reads from bottom to top.
    pub fn vertical_text(&mut self, (x, y): Point, words: &str) {
        let words = escaped(words);
        self.add(format_args!(
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" text-anchor=\"middle\" \
             class=\"label\">{words}</text>"
        ));
    }

    /// A straight line.
    pub fn line(&mut self, from: Point, to: Point, colour: &str) {
        self.stroke(from, to, colour, "");
    }

    /// A dashed line.
    pub fn dashed(&mut self, from: Point, to: Point) {
        self.stroke(from, to, colour::AXIS, " stroke-dasharray=\"4 4\"");
    }

    /// A filled disc: admitted.
    pub fn disc(&mut self, (x, y): Point, radius: f64) {
        let colour = colour::ADMITTED;
        self.add(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"/>"));
    }

    /// A cross: refused.
    pub fn cross(&mut self, (x, y): Point, radius: f64) {
        let (colour, r, side) = (colour::REFUSED, radius * 0.9, radius * 1.8);
        self.add(format_args!(
            "<path d=\"M{:.1} {:.1}l{side:.2} {side:.2}m0 {:.2}l{:.2} {side:.2}\" stroke=\"{colour}\" \
             stroke-width=\"{:.1}\"/>",
            x - r,
            y - r,
            -side,
            -side,
            radius * 0.5
        ));
    }

    /// A triangle that points up to the instant at which a request departs.
    pub fn triangle(&mut self, (x, y): Point, radius: f64) {
        let colour = colour::DEPARTED;
        self.add(format_args!(
            "<path d=\"M{x:.1} {:.1}l{radius} {}h{}z\" fill=\"{colour}\"/>",
            y - radius,
            radius * 2.0,
            -2.0 * radius
        ));
    }

    /// A line through corners given in milliseconds and units, with the area under it.
    pub fn steps(&mut self, corners: &[(u64, u64)], time: &Axis, level: &Axis) {
        let mut path = String::new();
        for (index, (millis, units)) in corners.iter().enumerate() {
            let (x, y) = (time.pixel(*millis as f64 / 1_000.0), level.pixel(*units as f64));
            let letter = if index == 0 { 'M' } else { 'L' };
            write!(path, "{letter}{x:.1} {y:.1}").expect("writing to a string does not fail");
        }
        let (floor, left, right) = (level.from.1, time.from.1, time.to.1);
        let (fill, stroke) = (colour::REMAINING, colour::ADMITTED);
        self.add(format_args!(
            "<path d=\"{path}L{right:.1} {floor:.1}L{left:.1} {floor:.1}z\" fill=\"{fill}\"/>\n\
             <path d=\"{path}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"1.5\"/>"
        ));
    }

    /// A filled rectangle from its upper left corner.
    pub fn rectangle(&mut self, (x, y): Point, (width, height): (f64, f64), colour: &str) {
        self.add(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
        ));
    }

    /// A line through points.
    pub fn polyline(&mut self, points: &[Point], colour: &str) {
        let mut path = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let letter = if index == 0 { 'M' } else { 'L' };
            write!(path, "{letter}{x:.1} {y:.1}").expect("writing to a string does not fail");
        }
        self.add(format_args!("<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"));
    }

    fn stroke(&mut self, (x1, y1): Point, (x2, y2): Point, colour: &str, dashes: &str) {
        self.add(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"{dashes}/>"
        ));
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{element}").expect("writing to a string does not fail");
    }
}

/// Text that is safe in elements and attributes of HTML and SVG.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            char => out.push(char),
        }
    }
    out
}
