"""A file in each language, and what is defined in it."""

from __future__ import annotations

SAMPLES: dict[str, tuple[str, list[str]]] = {
    "typescript": (
        """\
import { a } from "./a";
/** Doubles. */
export function double(x: number): number {
  return 2 * x;
}

export class Cart {
  items: string[] = [];
  /** Adds. */
  @log()
  add(item: string): void {
    this.items.push(item);
  }
}
export interface Shape { area(): number; }
type Name = string;
const f = (x) => x + 1;
""",
        ["double", "Cart", "Shape", "Name"],
    ),
    "javascript": (
        """\
class A {
  b() {
    return 1;
  }
  c = 2;
}
function* g() {
  yield 1;
}
""",
        ["A", "g"],
    ),
    "go": (
        """\
package main

import "fmt"

// Area of it.
// Really.
func (s *Square) Area() int {
\treturn s.w
}

type Square struct {
\tw int
}

func plain() {
\tfmt.Println()
}
""",
        ["Area", "Square", "plain"],
    ),
    "rust": (
        """\
use a::b;
/// A point.
#[derive(Debug)]
pub struct Point {
    x: i32,
}

impl Shape for Point {
    fn area(&self) -> i32 {
        self.x
    }
}

pub fn free(x: i32) -> i32 {
    x
}
""",
        ["Point", "Point", "free"],
    ),
    "java": (
        """\
package a;
import b.C;
/** Doc. */
@Service
public class Cart {
    private int n;
    /** Adds. */
    public void add(int x) {
        n += x;
    }
    Cart() {
        n = 1;
    }
}
""",
        ["Cart"],
    ),
    "c": (
        """\
#include <a.h>
/* Adds. */
static int *add(int a, int b)
{
    return 0;
}

struct point {
  int x;
};
typedef struct point point_t;
""",
        ["add", "point", "point_t"],
    ),
    "cpp": (
        """\
namespace n {
template <class T>
class Box {
 public:
  T get() const {
    return v;
  }
};
}
int n::Box::other() {
  return 1;
}
""",
        ["n", "other"],
    ),
    "csharp": (
        """\
using A;
namespace N {
  public class C {
    public int P { get; set; }
    public void M() {
      x();
    }
  }
}
""",
        ["N"],
    ),
    "ruby": (
        """\
module M
  class C
    def m(x)
      x
    end
  end
end
""",
        ["M"],
    ),
    "php": (
        """\
<?php
use A\\B;
class C {
  public function m() {
    return 1;
  }
}
function f() {
  return 2;
}
""",
        ["C", "f"],
    ),
    "kotlin": (
        """\
import a.b
/** K. */
class C(val x: Int) {
    fun m(): Int {
        return x
    }
}
fun top(a: Int) = a + 1
""",
        ["C", "top"],
    ),
    "swift": (
        """\
import A
class C {
    func m() -> Int {
        return 1
    }
    init() {
        x = 1
    }
}
""",
        ["C"],
    ),
    "scala": (
        """\
import a.b
object O {
  def m(x: Int): Int = {
    x
  }
}
""",
        ["O"],
    ),
    "lua": (
        """\
local function f(a)
  return a
end
function M.g(b)
  return b
end
""",
        ["f", "g"],
    ),
    "bash": (
        """\
# hello
hello() {
  echo 1
}
""",
        ["hello"],
    ),
    "zig": (
        """\
const std = @import("std");
pub fn main() void {
    return;
}
""",
        ["std", "main"],
    ),
    "julia": (
        """\
function f(x)
    x
end
struct S
    a
end
""",
        ["f", "S"],
    ),
    "haskell": (
        """\
module M where
import A
f :: Int -> Int
f x =
  x + 1
data T = A
  | B
""",
        ["f", "f", "T"],
    ),
    "elixir": (
        """\
defmodule A.B do
  use GenServer
  @doc "What it does."
  def f(a) when a > 1 do
    IO.puts(a)
  end
end
defprotocol P do
  def g(a)
end
""",
        ["A.B", "P"],
    ),
    "ocaml": (
        """\
let f x =
  x + 1
type t =
  | A
""",
        ["f", "t"],
    ),
    "sql": (
        """\
CREATE TABLE t (
  a int
);
CREATE VIEW v AS
SELECT 1;
""",
        ["t", "v"],
    ),
}
