package envd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/sdks"
)

// TestSDK has published versions of E2B's SDK call the daemon, as its users' programs do.
func TestSDK(t *testing.T) {
	node, scripts := sdks.Path(t, "sdk/node"), sdks.Scripts(t, "sdk")
	for _, name := range sdks.Names {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "-user", "user")
			c := b.command(false, node, filepath.Join(scripts, "suite.mjs"), name)
			c.Env = append(os.Environ(), "E2B_DEBUG=true", "E2B_API_KEY=e2b_00")
			sdks.Run(t, c, 15)
		})
	}
}
