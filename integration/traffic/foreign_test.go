package traffic

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/orchestrator/doctor"
)

// TestFirewall: where Docker has the host drop what it doesn't know, sandboxes have no internet, `cube doctor` says by whom and
// what to do, `cube up` warns, and what the doctor says is all there is to do.
func TestFirewall(t *testing.T) {
	b := newBox(t, "behind")
	if got := answered(t, b); got != "still here" {
		t.Fatalf("before, it gets %q", got)
	}
	wall := dockersTable(t)
	if got := b.sh("timeout 3 bash -c '" + reach(testhost.Server) + "'; echo $?"); got != "124" {
		t.Errorf("behind the firewall it gets %q", got)
	}
	remedy := blocker(t, "chain FORWARD of nftables table ip filter (Docker)")
	s.End(t, up(), unix.SIGTERM)
	if r := cube(t, "up", "-d"); !strings.Contains(r.Stdout+r.Stderr, "others' rules stop sandboxes' packets") {
		t.Errorf("cube up doesn't warn: %+v", r)
	}
	log, err := os.ReadFile(filepath.Join(s.Config.LogDir(), "cube.log"))
	must(t, err)
	if !strings.Contains(string(log), remedy) {
		t.Errorf("the remedy %q isn't in the log", remedy)
	}
	wall.obey(t, remedy)
	if got := answered(t, b); got != "still here" {
		t.Errorf("with the remedy it gets %q", got)
	}
	if again := blockers(t); len(again) > 0 {
		t.Errorf("the doctor isn't content: %+v", again)
	}
}

// blockers is what the doctor finds wrong with the network.
func blockers(t *testing.T) (found []doctor.Finding) {
	t.Helper()
	r := s.Cube("doctor", "--json")
	if err := json.Unmarshal([]byte(r.Stdout), &found); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	return slices.DeleteFunc(found, func(f doctor.Finding) bool { return f.Name != "network" || f.Level != doctor.Fail })
}

// blocker finds the one that is to be there, and returns its remedy.
func blocker(t *testing.T, what string) string {
	t.Helper()
	found := blockers(t)
	if len(found) != 1 || !strings.HasPrefix(found[0].Detail, what) {
		t.Fatalf("the doctor finds %+v", found)
	}
	return found[0].Remedy
}

// table is somebody's of the host's, as iptables makes it.
type table struct {
	*nftables.Table
}

// dockersTable drops what is forwarded, but for what comes from or goes to Docker's own bridge. It goes with the test.
func dockersTable(t *testing.T) *table {
	t.Helper()
	drop := nftables.ChainPolicyDrop
	w := &table{&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4}}
	w.change(t, func(c *nftables.Conn) {
		c.AddTable(w.Table)
		forward := c.AddChain(&nftables.Chain{Name: "FORWARD", Table: w.Table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
		user := c.AddChain(&nftables.Chain{Name: "DOCKER-USER", Table: w.Table})
		c.AddRule(&nftables.Rule{Table: w.Table, Chain: forward, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: user.Name}}})
		for _, key := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
			c.AddRule(&nftables.Rule{Table: w.Table, Chain: forward, Exprs: acceptOf(key, "docker0")})
		}
	})
	t.Cleanup(func() { w.change(t, func(c *nftables.Conn) { c.DelTable(w.Table) }) })
	return w
}

func (w *table) change(t *testing.T, do func(*nftables.Conn)) {
	t.Helper()
	must(t, s.Host.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		do(c)
		return c.Flush()
	}))
}

// acceptOf is what iptables makes of -i or -o and -j ACCEPT.
func acceptOf(key expr.MetaKey, device string) []expr.Any {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, device)
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
		&expr.Counter{},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}
}

// insert is the only command of iptables that is known here, and not all hosts have iptables.
var insert = regexp.MustCompile(`^iptables -I ([A-Z-]+) (-i|-o) ([a-z0-9-]+) -j ACCEPT$`)

// obey does what a remedy says: commands of iptables.
func (w *table) obey(t *testing.T, remedy string) {
	t.Helper()
	for _, command := range strings.Split(remedy, "; ") {
		m := insert.FindStringSubmatch(command)
		if m == nil {
			t.Fatalf("the remedy has the command %q", command)
		}
		key := expr.MetaKeyIIFNAME
		if m[2] == "-o" {
			key = expr.MetaKeyOIFNAME
		}
		w.change(t, func(c *nftables.Conn) {
			c.InsertRule(&nftables.Rule{Table: w.Table, Chain: &nftables.Chain{Name: m[1], Table: w.Table}, Exprs: acceptOf(key, m[3])})
		})
	}
}
