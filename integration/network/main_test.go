// Package network shows what machines have of the network: the real card in a guest of its own, and whole stacks on a host
// of the test's (package testhost) whose containers reach its internet, and nothing else.
package network

import (
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }
