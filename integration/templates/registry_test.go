package templates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// certificate is that of registries on the test's internet. The stack trusts it from its start on.
var certificate tls.Certificate

// trust makes the certificate, and has the daemons that are started from now on trust it. What they read of it when they need it is in
// no directory, but in memory of this process.
func trust() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{testhost.Server.AsSlice()}, NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	certificate = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	fd, err := unix.MemfdCreate("authorities", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})); err != nil {
		return err
	}
	return os.Setenv("SSL_CERT_FILE", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd))
}

// shop is a registry on the test's internet.
type shop struct {
	http.Handler
	// let is how many blobs may still be fetched. Who asks for another one waits as long as it has patience, and is told of by asked.
	let   atomic.Int32
	asked chan struct{}
}

func (h *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") || h.let.Add(-1) >= 0 {
		h.Handler.ServeHTTP(w, r)
		return
	}
	select {
	case h.asked <- struct{}{}:
	default:
	}
	<-r.Context().Done()
}

// openShop has a registry be at those ports of the test's server.
func openShop(t *testing.T, ports ...string) *shop {
	t.Helper()
	h := &shop{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0))), asked: make(chan struct{}, 1)}
	h.let.Store(math.MaxInt32)
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	t.Cleanup(func() { srv.Close() })
	for _, port := range ports {
		l, err := s.Host.Internet.Listen("tcp4", net.JoinHostPort(testhost.Server.String(), port))
		must(t, err)
		go func() { _ = srv.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})) }()
	}
	return h
}

// cube runs a command, which must succeed.
func cube(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	began := time.Now()
	r := s.Cube(args...)
	if r.Err != nil {
		t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
	}
	t.Logf("cube %s: %.1f s\n%s", strings.Join(args, " "), time.Since(began).Seconds(), r.Stderr)
	return strings.TrimSpace(r.Stdout), r.Stderr
}

// TestRegistry: a template is pushed, deleted, and comes back by another name, with what runs in it. The long form pushes it again,
// takes it from a registry that isn't trusted, with its disk alone, and has pulls be interrupted and killed.
func TestRegistry(t *testing.T) {
	if s == nil {
		t.Skip("SKIPPED: TestSteps has a stack")
	}
	_, trusted, _ := net.SplitHostPort(stack.TrustedRegistry)
	const other = "5001"
	h := openShop(t, trusted, other)
	key, _ := cube(t, "key", "create", "--team", team)
	cube(t, "template", "build", "--cpus", "1", "--memory", "256", "--run", "date +%s%N >~/begun; exec sleep 4321", "--ready", "[ -s ~/begun ]", "origin", stack.Image)
	built := time.Now()
	at, _ := cube(t, "template", "push", "origin", stack.TrustedRegistry+"/team/origin:v1")
	if !strings.HasPrefix(at, stack.TrustedRegistry+"/team/origin@sha256:") {
		t.Errorf("it was pushed to %s", at)
	}
	cube(t, "template", "rm", "origin")
	if _, said := cube(t, "template", "pull", stack.TrustedRegistry+"/team/origin:v1", "whole:v1"); strings.Contains(said, "only its disk") {
		t.Error(said)
	}
	cube(t, "image", "rm", sandbox.Blank) // it is made where it is needed
	if begun := begun(t, key, "whole:v1"); begun.After(built) {
		t.Errorf("what runs in it has begun at %v, not before %v", begun, built)
	}
	if r := s.Cube("template", "push", "whole:v1", "127.0.0.1:1/a:1"); r.Err == nil || !strings.Contains(r.Stderr, "127.0.0.1:1 is of this host") {
		t.Errorf("to this host: %+v", r)
	}
	if long {
		pullLong(t, h, key, at, other)
	}
	cube(t, "template", "rm", "whole")
}

func pullLong(t *testing.T, h *shop, key, at, other string) {
	// What was pulled is pushed as it was, but for its time.
	if again, said := cube(t, "template", "push", "whole:v1", stack.TrustedRegistry+"/team/origin:v2"); again == at || !strings.Contains(said, "0B in ") {
		t.Errorf("pushed again it is %s: %s", again, said)
	}
	if r := s.Cube("template", "pull", stack.TrustedRegistry+"/team/none:1"); r.Err == nil || !strings.Contains(r.Stderr, "the registry doesn't have it") {
		t.Errorf("what isn't there: %+v", r)
	}
	built := time.Now()
	_, said := cube(t, "template", "pull", "--public", net.JoinHostPort(testhost.Server.String(), other)+strings.TrimPrefix(at, stack.TrustedRegistry))
	if !strings.Contains(said, "only its disk is taken") {
		t.Error(said)
	}
	if begun := begun(t, key, "origin"); begun.Before(built) {
		t.Errorf("what runs in it has begun at %v, not after %v", begun, built)
	}
	cube(t, "template", "rm", "origin")
	before := saved(t)
	for what, end := range map[string]func(pull *exec.Cmd){
		"interrupted": func(pull *exec.Cmd) { s.End(t, pull.Process.Pid, unix.SIGINT) },
		"killed": func(*exec.Cmd) {
			for _, p := range s.Processes(" up --daemon") {
				s.End(t, p.PID, unix.SIGKILL)
			}
			cube(t, "up", "-d")
		},
	} {
		h.let.Store(4) // what describes it, twice, and some of the rest
		pull := s.Command("cube", "template", "pull", stack.TrustedRegistry+"/team/origin:v1", "gone")
		must(t, pull.Start())
		<-h.asked
		if half, err := filepath.Glob(filepath.Join(s.Config.SnapshotDir(), ".tmp-*")); err != nil || len(half) != 1 {
			t.Errorf("%s: half of it is %v, %v", what, half, err)
		}
		end(pull)
		if pull.Wait() == nil {
			t.Errorf("%s: it has succeeded", what)
		}
		h.let.Store(math.MaxInt32)
		s.Eventually(t, time.Minute, "nothing of one that was "+what, func() bool {
			return !slices.ContainsFunc(saved(t), func(name string) bool { return !slices.Contains(before, name) })
		})
		if r := s.Cube("template", "inspect", "gone"); r.Err != nil || !strings.Contains(r.Stdout, `"state": "error"`) {
			t.Errorf("%s: %+v", what, r)
		}
		cube(t, "template", "rm", "gone")
	}
}

// saved is all that the store of snapshots has.
func saved(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(s.Config.SnapshotDir())
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// begun has a sandbox of a template tell when the command that it runs has begun.
func begun(t *testing.T, key, template string) time.Time {
	t.Helper()
	cmd := s.Command("cube", "batch", "--template", template, "--count", "1", "--json", "--",
		`for p in /proc/[0-9]*; do [ "$(tr '\0' ' ' <$p/cmdline)" != 'sleep 4321 ' ] || echo runs since $(cat ~/begun); done`)
	cmd.Env = append(cmd.Env, "CUBE_API_URL=http://"+s.Config.API.Listen.String(), "CUBE_API_KEY="+key)
	r := s.Run(cmd, nil)
	_, after, found := strings.Cut(r.Stdout, `runs since `)
	text, _, _ := strings.Cut(after, `\n`)
	ns, err := strconv.ParseInt(text, 10, 64)
	if r.Err != nil || !found || err != nil {
		t.Fatalf("%s: %s%s, %v", template, r.Stdout, r.Stderr, r.Err)
	}
	return time.Unix(0, ns)
}
