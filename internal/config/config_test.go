package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLoad(t *testing.T) {
	for _, tc := range []struct {
		name, file, err string
		check           func(*Config) bool
	}{
		{name: "empty", check: func(c *Config) bool {
			return c.RunDir == "/run/cube" && c.ContainerdSocket() == "/run/cube/containerd.sock" && c.VM.Memory == 256<<20
		}},
		{name: "sizes and times", file: "ready_timeout = '90s'\n[vm]\nmemory = '1GiB'\n", check: func(c *Config) bool {
			return time.Duration(c.ReadyTimeout) == 90*time.Second && c.VM.Memory == 1<<30
		}},
		{name: "unknown key", file: "[vm]\nmemori = '1GiB'\n", err: "line 2: unknown key [vm memori]"},
		{name: "syntax", file: "state_dir = \n", err: "line 1"},
		{name: "bad size", file: "[vm]\nmemory = 'lots'\n", err: "is not a size"},
		{name: "accelerator", file: "[vm]\naccelerator = 'xen'\n", err: "must be auto, kvm or tcg"},
		{name: "relative", file: "state_dir = 'x'\n", err: "absolute"},
		{name: "long run dir", file: "run_dir = '/" + strings.Repeat("x", 70) + "'\n", err: "60 bytes"},
		{name: "watermarks", file: "[store]\nhigh_watermark = 50\nlow_watermark = 40\n", check: func(c *Config) bool { return c.Store.HighWatermark == 50 && c.Store.LowWatermark == 40 }},
		{name: "high watermark below the low one", file: "[store]\nhigh_watermark = 50\n", err: "store.high_watermark = 50"},
		{name: "watermark of more than all", file: "[store]\nhigh_watermark = 101\n", err: "store.high_watermark = 101"},
		{name: "logs", file: "[logs]\nmax_size = '1MiB'\n", check: func(c *Config) bool { return c.Logs.MaxSize == 1<<20 && c.Logs.MaxFiles == 3 }},
		{name: "small logs", file: "[logs]\nmax_size = '1KiB'\n", err: "logs.max_size"},
		{name: "no logs", file: "[logs]\nmax_files = 0\n", err: "logs.max_files"},
		{name: "registries", file: "[templates]\ntrusted_registries = ['r.example:5000', '192.0.2.1', '[2001:db8::1]:5000']\n", check: func(c *Config) bool { return len(c.Templates.TrustedRegistries) == 3 }},
		{name: "a registry with a path", file: "[templates]\ntrusted_registries = ['r.example/a']\n", err: "templates.trusted_registries"},
		{name: "a pool of none", file: "[pool]\nmax_per_template = 0\n", err: "pool.max_per_template"},
		{name: "audit", file: "[audit]\nmax_files = 5\n", check: func(c *Config) bool { return c.Audit.MaxFiles == 5 && c.Audit.MaxSize == 64<<20 }},
		{name: "no audit", file: "[audit]\nmax_files = 0\n", err: "audit.max_files"},
		{name: "small audit", file: "[audit]\nmax_size = '1KiB'\n", err: "audit.max_size"},
		{name: "all is kept", file: "[retention.team.blue]\npaused_keep = 0\n", check: func(c *Config) bool { return c.Retention.Forever() && c.Retention.Of("blue") == Kept{} }},
		{name: "retention", file: "[retention]\nsnapshot_ttl = '24h'\nsnapshot_keep = 3\n[retention.team.blue]\nsnapshot_keep = 0\npaused_ttl = '1h'\n", check: func(c *Config) bool {
			keep := 7
			once := c.Retention.With(Keep{SnapshotKeep: &keep})
			return !c.Retention.Forever() && c.Retention.Of("red") == Kept{SnapshotTTL: 24 * time.Hour, SnapshotKeep: 3} &&
				c.Retention.Of("blue") == Kept{SnapshotTTL: 24 * time.Hour, PausedTTL: time.Hour} &&
				once.Of("red") == Kept{SnapshotTTL: 24 * time.Hour, SnapshotKeep: 7} && once.Of("blue").SnapshotKeep == 7
		}},
		{name: "keep for a blink", file: "[retention]\nsnapshot_ttl = '1ms'\n", err: "retention.snapshot_ttl"},
		{name: "keep less than nothing", file: "[retention.team.blue]\npaused_keep = -1\n", err: "retention.team.blue.paused_keep"},
		{name: "keep of no team", file: "[retention.team.Blue]\nsnapshot_keep = 1\n", err: "retention.team.Blue: a team's name"},
		{name: "unknown of a team", file: "[retention.team.blue]\nkeep = 1\n", err: "unknown key"},
		{name: "network", file: "[network]\npool = '172.30.0.0/20'\nmark_mask = 0x700\ndns_upstreams = ['192.0.2.1', '[2001:db8::1]:5353']\n", check: func(c *Config) bool {
			return c.Network.Gateway().String() == "172.30.15.254" && c.Network.Marks() == Marks{0x700, 0x100, 0x200, 0x300, 0x400} &&
				c.Network.DNSUpstreams[0].String() == "192.0.2.1:53" && c.Network.DNSUpstreams[1].String() == "[2001:db8::1]:5353"
		}},
		{name: "pool with host bits", file: "[network]\npool = '10.1.2.3/16'\n", err: "network.pool"},
		{name: "pool too small", file: "[network]\npool = '10.1.2.0/25'\n", err: "network.pool"},
		{name: "pool of loopback", file: "[network]\npool = '127.0.0.0/8'\n", err: "hosts can have"},
		{name: "pool of IPv6", file: "[network]\npool = 'fd00::/16'\n", err: "network.pool"},
		{name: "device", file: "[network]\ndevice = 'too-long-name'\n", err: "network.device"},
		{name: "table", file: "[network]\nnft_table = 'a b'\n", err: "network.nft_table"},
		{name: "mask of two bits", file: "[network]\nmark_mask = 0x3\n", err: "network.mark_mask"},
		{name: "mask with a gap", file: "[network]\nmark_mask = 0x17\n", err: "side by side"},
		{name: "main table", file: "[network]\nroute_table = 254\n", err: "the kernel's"},
		{name: "rule after main", file: "[network]\nrule_priority = 32766\n", err: "network.rule_priority"},
		{name: "one port for two", file: "[network]\ndns_port = 10443\n", err: "two different ports"},
		{name: "flows", file: "[network]\nmax_flows = 0\n", err: "network.max_flows"},
		{name: "upstream", file: "[network]\ndns_upstreams = ['dns.example']\n", err: "is not an address"},
		{name: "upstream nowhere", file: "[network]\ndns_upstreams = ['0.0.0.0']\n", err: "0.0.0.0:53"},
		{name: "upstream in the pool", file: "[network]\ndns_upstreams = ['10.200.0.1']\n", err: "network.pool"},
		{name: "API", file: "[api]\nlisten = '[::1]:80'\nmax_timeout = '24h'\ntraces = 'https://otel.example:4318'\n", check: func(c *Config) bool {
			return c.API.Listen.Port() == 80 && time.Duration(c.API.MaxTimeout) == 24*time.Hour
		}},
		{name: "API's port", file: "[api]\nlisten = '127.0.0.1:0'\n", err: "api.listen"},
		{name: "negative timeout", file: "[api]\nmax_timeout = '-1s'\n", err: "api.max_timeout"},
		{name: "timeout of a blink", file: "[api]\nmax_timeout = '1ms'\n", err: "api.max_timeout"},
		{name: "sandboxes of the API", file: "[api]\nmax_sandboxes = 1\n", err: "line 2: unknown key [api max_sandboxes]"},
		{name: "traces nowhere", file: "[api]\ntraces = 'localhost:4318'\n", err: "api.traces"},
		{name: "proxy", check: func(c *Config) bool {
			return c.Proxy.Name() == "sandbox.localhost" && c.Proxy.Authority() == "sandbox.localhost:3002"
		}},
		{name: "proxy on HTTPS's port", file: "[proxy]\nlisten = '[::]:443'\ndomain = 'sandbox.example'\n", check: func(c *Config) bool { return c.Proxy.Authority() == "sandbox.example" }},
		{name: "proxy behind another port", file: "[proxy]\ndomain = 'sandbox.example:8443'\n", check: func(c *Config) bool {
			return c.Proxy.Name() == "sandbox.example" && c.Proxy.Authority() == "sandbox.example:8443"
		}},
		{name: "proxy's address", file: "[proxy]\nlisten = '127.0.0.1'\n", err: "line 2: toml: not an ip:port"},
		{name: "proxy's port", file: "[proxy]\nlisten = '127.0.0.1:0'\n", err: "proxy.listen"},
		{name: "domain", file: "[proxy]\ndomain = 'Sandbox.example'\n", err: "proxy.domain"},
		{name: "domain of an address", file: "[proxy]\ndomain = '10.0.0.1'\n", err: "proxy.domain"},
		{name: "domain's port", file: "[proxy]\ndomain = 'sandbox.example:x'\n", err: "proxy.domain"},
		{name: "certificate without key", file: "[proxy]\ntls_cert = '/x'\n", err: "go together"},
		{name: "relative certificate", file: "[proxy]\ntls_cert = 'x'\ntls_key = 'y'\n", err: "absolute"},
		{name: "admission", file: "[admission]\nmemory_headroom = '1GiB'\ncpu_overcommit = 8\nmemory_overcommit = 1.5\nio_pressure = 100\n", check: func(c *Config) bool {
			return c.Admission == Admission{MemoryHeadroom: 1 << 30, CPUOvercommit: 8, MemoryOvercommit: 1.5, DiskOvercommit: 64, DisposableMemory: 96 << 20, MemoryPressure: 20, IOPressure: 100}
		}},
		{name: "less than nothing is overcommitted", file: "[admission]\ncpu_overcommit = 0.5\n", err: "admission.cpu_overcommit = 0.5 must be between 1"},
		{name: "no factor", file: "[admission]\nmemory_overcommit = nan\n", err: "admission.memory_overcommit = NaN"},
		{name: "any factor", file: "[admission]\ndisk_overcommit = inf\n", err: "admission.disk_overcommit"},
		{name: "pressure of more than all", file: "[admission]\nmemory_pressure = 101\n", err: "admission.memory_pressure = 101"},
		{name: "negative pressure", file: "[admission]\ncpu_pressure = -1\n", err: "admission.cpu_pressure = -1"},
		{name: "no floor", file: "[admission]\ndisposable_memory = '1KiB'\n", err: "admission.disposable_memory"},
		{name: "limits", file: "[limits]\nrunning = 20\nmemory = '8GiB'\n[limits.team.blue]\nrunning = 0\ncreates_per_minute = 30\n", check: func(c *Config) bool {
			red, none := c.Limits.Of("red")
			blue, own := c.Limits.Of("blue")
			return red.Running == 20 && red.Builds == 8 && red.CreatesPerMinute == 0 && len(none) == 0 && blue.Running == 0 && blue.Memory == 8<<30 && blue.CreatesPerMinute == 30 &&
				blue.CreateBurst == 20 && own["running"] && own["creates_per_minute"] && len(own) == 2
		}},
		{name: "negative limit", file: "[limits]\nrunning = -1\n", err: "limits.running = -1"},
		{name: "negative limit of a team's", file: "[limits.team.blue]\nvcpus = -1\n", err: "limits.team.blue.vcpus = -1"},
		{name: "limit that there isn't", file: "[limits.team.blue]\nrunners = 1\n", err: "line 2: unknown key [limits team blue runners]"},
		{name: "no burst", file: "[limits]\ncreate_burst = 0\n", err: "limits.create_burst"},
		{name: "any rate", file: "[limits]\ncreates_per_minute = 1000001\n", err: "limits.creates_per_minute"},
		{name: "no team", file: "[limits.team.'Blue Team']\nrunning = 1\n", err: "limits.team.Blue Team"},
		{name: "uid range", file: "[vm]\nuid_base = 0\n", err: "unprivileged"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := filepath.Join(t.TempDir(), "config.toml")
			if err := os.WriteFile(f, []byte(tc.file), 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := Load(f)
			switch {
			case tc.err == "" && err != nil:
				t.Fatal(err)
			case tc.err == "" && !tc.check(c):
				t.Fatalf("unexpected %+v", c)
			case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
				t.Fatalf("got %v, want %q", err, tc.err)
			}
		})
	}
}

func TestLoadMissingFileThatWasNamed(t *testing.T) {
	if _, err := Load("/nonexistent/config.toml"); err == nil {
		t.Fatal("a missing file that was named must be an error")
	}
}
