package e2b

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// template makes one of an image that deploy/setup/image.sh makes for the long tests alone, and a sandbox of it.
func (c *client) template(name, memory string) sandbox {
	c.Helper()
	if os.Getenv("CUBE_TEST_LONG") == "" {
		c.Skip("it takes minutes and an image of its own: CUBE_TEST_LONG=1 runs it")
	}
	archive := filepath.Join(stack.Cache(), "images", name+"-bookworm.tar")
	if _, err := os.Stat(archive); err != nil {
		c.Skipf("SKIPPED: no image (deploy/setup/image.sh %s makes it): %v", name, err)
	}
	for _, args := range [][]string{
		{"image", "import", archive},
		{"template", "build", "--public", "--memory", memory, name, "cube.local/" + name + ":bookworm"},
	} {
		if r := s.Cube(args...); r.Err != nil {
			c.Fatal(r.Err)
		}
	}
	c.limit = 5 * time.Minute
	return c.create(map[string]any{"templateID": name})
}

// TestDocker: Debian's dockerd runs in a sandbox, builds an image there and runs containers of it, which are limited, reach the
// internet by names, are reached from outside, and go on when the sandbox was paused.
func TestDocker(t *testing.T) {
	c := newClient(t)
	sb := c.template("docker", "1024")
	// Its containerd is started first, as by Debian's units: dockerd waits for one that it starts itself for 15 s.
	c.says(sb, `sudo setsid containerd >containerd.log 2>&1 &
timeout 240 sh -c 'until sudo ctr version >/dev/null 2>&1; do sleep 1; done' || tail containerd.log
sudo setsid dockerd --containerd /run/containerd/containerd.sock >dockerd.log 2>&1 &
timeout 240 sh -c 'until sudo docker info >/dev/null 2>&1; do sleep 1; done' || tail dockerd.log
sudo docker info --format '{{.Driver}} {{.CgroupDriver}} {{.CgroupVersion}}'`, "overlay2 cgroupfs 2")
	if t.Failed() {
		return
	}
	c.says(sb, `mkdir build && cp /bin/busybox build && cat >build/Dockerfile <<'EOF'
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
CMD echo of the container
EOF
sudo docker build -t local build >build.log 2>&1 || { cat build.log; exit 1; }
sudo docker run --rm local; sudo docker run --rm local id -u`, "of the container\n0")
	// Its address is the host's uplink, as for all that is in the sandbox.
	c.says(sb, fmt.Sprintf("echo who | sudo docker run --rm -i local nc server.test %d", testhost.DataPort), testhost.Uplink.String())
	c.says(sb, `sudo docker run --rm -m 32m local sh -c 'head -c 100m /dev/zero | tail -c 100m >/dev/null; echo $?' 2>/dev/null`, "137")
	c.says(sb, `sudo docker run -d --name web -p 8080:80 local sh -c 'echo of the container >/index.html; exec httpd -f -p 80 -h /' >/dev/null; echo started`, "started")
	sees := func() bool { return c.page(sb, 8080) == "of the container\n" }
	s.Eventually(t, time.Minute, "an answer of the container's server", sees)
	c.do("POST", "/sandboxes/"+sb.ID+"/pause", nil, nil, 204)
	c.do("POST", "/v2/sandboxes/"+sb.ID+"/connect", map[string]any{"timeout": 3600}, nil, 201)
	s.Eventually(t, time.Minute, "an answer of the container's server", sees)
	c.says(sb, "sudo docker ps --format '{{.Names}} {{.State}}'; sudo docker rm -f web", "web running\nweb")
	c.killAll()
}

// TestBrowser: Debian's Chromium, with its own sandbox, opens a page of a server on the internet, and the page's script runs.
func TestBrowser(t *testing.T) {
	c := newClient(t)
	sb := c.template("browser", "1536")
	l, err := s.Host.Internet.Listen("tcp", netip.AddrPortFrom(testhost.Server, 8080).String())
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "<!doctype html><p id=p>not yet</p><script>document.getElementById('p').textContent = 'a page of ' + location.host + ', sum ' + (40 + 2)</script>")
	})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Close()
		<-served
	})
	// Without a sandbox of its own it doesn't start, unless it is told to.
	out, err := c.run(sb, "chromium --headless --disable-gpu --dump-dom http://server.test:8080/")
	if err != nil || !strings.Contains(out, "a page of server.test:8080, sum 42") {
		t.Errorf("%v:\n%s", err, out)
	}
	c.killAll()
}
