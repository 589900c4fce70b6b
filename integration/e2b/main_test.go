// Package e2b runs published E2B SDKs and command lines against a whole stack: real machines, its API and its proxy.
package e2b

import (
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// s is the stack that all tests share; it has the template base.
var s *stack.Stack

func TestMain(m *testing.M) {
	stack.Main(m, &s, (*stack.Stack).BuildBase)
}
