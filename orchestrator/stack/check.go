package stack

import (
	"context"
	"fmt"
	"strings"
	"time"

	introspection "github.com/containerd/containerd/api/services/introspection/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/dialer"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/snapshotter"
)

// The oldest containerd that speaks this shim's protocol.
const minMajor, minMinor = 2, 3

// ConfigError says that an existing containerd isn't configured for this stack. Snippet is what its configuration
// lacks.
type ConfigError struct {
	Address string
	Reason  string
	Snippet []byte
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("containerd at %s isn't set up for Cube: %s; merge the printed lines into its configuration and restart it", e.Address, e.Reason)
}

// dial connects to a containerd that may not serve yet: calls wait for it until their context ends.
func dial(cfg *config.Config) (*client.Client, error) {
	retry := backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second}
	c, err := client.New(cfg.ContainerdSocket(),
		client.WithDefaultNamespace(cfg.Containerd.Namespace),
		client.WithDefaultRuntime(sandbox.Runtime),
		client.WithDialOpts([]grpc.DialOption{
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(dialer.ContextDialer),
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: 5 * time.Second}),
		}),
		client.WithCallOpts([]grpc.CallOption{grpc.WaitForReady(true)}))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %s: %w", cfg.ContainerdSocket(), err)
	}
	return c, nil
}

// checkContainerd waits for containerd to answer and makes sure that it can serve this stack: its version, the
// snapshotter, the differ and the shim. It returns its version.
func checkContainerd(ctx context.Context, cfg *config.Config, c *client.Client) (string, error) {
	address := cfg.ContainerdSocket()
	v, err := c.Version(ctx)
	if err != nil {
		return "", fmt.Errorf("containerd at %s doesn't answer: %w", address, err)
	}
	if err := checkVersion(v.Version); err != nil {
		return "", fmt.Errorf("containerd at %s: %w", address, err)
	}
	have, err := c.IntrospectionService().Plugins(ctx)
	if err != nil {
		return "", fmt.Errorf("ask containerd at %s for its plugins: %w", address, err)
	}
	reason := missing(cfg, have.Plugins)
	if reason == "" {
		reason = checkRuntime(ctx, c)
	}
	if reason == "" {
		return v.Version, nil
	}
	if cfg.Containerd.Address == "" {
		return "", fmt.Errorf("%s; bin_dir is %s", reason, cfg.BinDir)
	}
	snippet, err := Snippet(cfg)
	if err != nil {
		return "", err
	}
	return "", &ConfigError{Address: address, Reason: reason, Snippet: snippet}
}

// meetSnapshotter waits until containerd reaches the snapshotter: one that has gone on without it tries again only after up to
// 3 s, and refuses what needs it until then. A snapshot that is made and removed also has containerd collect what was removed
// while there was no snapshotter; by itself it does that when the next one is.
func meetSnapshotter(ctx context.Context, c *client.Client) error {
	const key = "cube-up"
	store := c.SnapshotService(snapshotter.Name)
	for {
		_, err := store.View(ctx, key, "")
		there := errdefs.IsAlreadyExists(err) // of a `cube up` that was killed here: it says nothing of the snapshotter
		if err == nil || there {
			if err = store.Remove(ctx, key); errdefs.IsNotFound(err) { // nobody keeps it: containerd has collected it already
				err = nil
			}
		}
		switch {
		case err == nil && !there:
			return nil
		case err != nil && (!errdefs.IsUnavailable(err) || !sleep(ctx, 50*time.Millisecond)):
			return fmt.Errorf("containerd doesn't reach the snapshotter: %w", err)
		}
	}
}

// checkVersion refuses a containerd that is too old, or doesn't say how old it is.
func checkVersion(v string) error {
	var major, minor int
	if _, err := fmt.Sscanf(strings.TrimPrefix(v, "v"), "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("version %q is unknown: Cube needs %d.%d or later", v, minMajor, minMinor)
	}
	if major < minMajor || major == minMajor && minor < minMinor {
		return fmt.Errorf("version %s is too old: Cube needs %d.%d or later; leave containerd.address out to run a private one", v, minMajor, minMinor)
	}
	return nil
}

// missing says which plugin of Cube's containerd doesn't have, or has of another stack.
func missing(cfg *config.Config, have []*introspection.Plugin) string {
	for _, want := range []struct{ kind, id string }{
		{plugins.SnapshotPlugin.String(), snapshotter.Name},
		{plugins.DiffPlugin.String(), differName},
	} {
		found := false
		for _, p := range have {
			if p.Type != want.kind || p.ID != want.id {
				continue
			}
			found = true
			if p.InitErr != nil {
				return fmt.Sprintf("its plugin %s.%s failed: %s", want.kind, want.id, p.InitErr.Message)
			}
			if at := p.Exports["address"]; at != cfg.SnapshotterSocket() {
				return fmt.Sprintf("its plugin %s.%s is at %s, not %s", want.kind, want.id, at, cfg.SnapshotterSocket())
			}
		}
		if !found {
			return fmt.Sprintf("it has no plugin %s.%s", want.kind, want.id)
		}
	}
	return ""
}

// checkRuntime has containerd run the shim, which says why it can't.
func checkRuntime(ctx context.Context, c *client.Client) string {
	info, err := c.RuntimeInfo(ctx, sandbox.Runtime, nil)
	if err != nil {
		return fmt.Sprintf("it can't run the shim of %s (is it in its PATH?): %v", sandbox.Runtime, err)
	}
	if info.Name != sandbox.Runtime {
		return fmt.Sprintf("its shim of %s says it is %s", sandbox.Runtime, info.Name)
	}
	return ""
}
